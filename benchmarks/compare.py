"""Time msrm against the released peer, run by run in alternation, and write one JSON with medians and ratios.

    python benchmarks/compare.py r rec.npz --peer PEER_PYTHON PEER_SCRIPT --repeats 5 --out benchmarks/r_3600.json

The peer (multimodalsrm 0.2.0) is installed in an environment of its own; its script prints one JSON object whose
``seconds`` (or ``warm_seconds``) is the figure, as ``benchmarks/ours.py`` does for msrm. Every run is a fresh process.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from msrm import runtime

FIGURE = {"r": "seconds", "gradient": "warm_seconds", "map": "seconds", "forrest": "seconds"}


def run(command: list[str], threads: int) -> dict[str, object]:
    """The last JSON object a command prints, run with a number of BLAS threads."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=sorted(FIGURE))
    parser.add_argument("recording")
    parser.add_argument("--peer", nargs=2, metavar=("PYTHON", "SCRIPT"), help="the peer's interpreter and script")
    parser.add_argument("--peer-arguments", default="", help="further arguments of the peer's script")
    parser.add_argument("--ours-arguments", default="", help="further arguments of benchmarks/ours.py")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-repeats", type=int, help="fewer runs of a slow peer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    ours = [sys.executable, str(Path(__file__).with_name("ours.py")), arguments.what, arguments.recording]
    ours += arguments.ours_arguments.split()
    runs: dict[str, list[dict[str, object]]] = {"msrm": [], "peer": []}
    peer_repeats = arguments.peer_repeats if arguments.peer_repeats is not None else arguments.repeats
    for i in range(arguments.repeats):
        runs["msrm"].append(run(ours, arguments.threads))
        if arguments.peer and i < peer_repeats:
            peer = [*arguments.peer, arguments.what, arguments.recording, *arguments.peer_arguments.split()]
            runs["peer"].append(run(peer, arguments.threads))
    figure = FIGURE[arguments.what]
    medians = {name: median(float(one[figure]) for one in found) for name, found in runs.items() if found}  # type: ignore[arg-type]
    report = {
        "what": arguments.what,
        "recording": Path(arguments.recording).name,
        "threads": arguments.threads,
        "figure": figure,
        "median_seconds": medians,
        "ratio": medians["peer"] / medians["msrm"] if "peer" in medians else None,
        "runs": {name: [_without_paths(one) for one in found] for name, found in runs.items()},
        "machine": runtime.describe(),
    }
    arguments.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
    print(json.dumps({key: report[key] for key in ("what", "recording", "median_seconds", "ratio")}))


def _without_paths(one: dict[str, object]) -> dict[str, object]:
    return {key: Path(value).name if key == "recording" else value for key, value in one.items()}  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
