"""Two cards at work on chains that do not depend on each other, one process a card, against one card alone.

    python tests/cuda/two_gpus.py --out two_gpus.json

Each process sees one card through CUDA_VISIBLE_DEVICES, compiles, waits for the others and makes the same number of
sweeps of its own Gibbs chains. The figure is the sweeps a second of two cards over those of one; 1.9 is wanted.
It also checks that a chain on the second card is bit for bit what it is on the first.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WANTED = 1.9


def work(seed: int, chains: int, dispatches: int, features: int, seconds: float, gate: Path) -> dict[str, Any]:
    """Compile, say so, wait for the gate, sweep; sweeps a second and a digest of the draws."""
    import numpy as np

    import msrm
    from msrm.gp import sampling
    from msrm.gp.devices import use_compilation_cache
    from msrm.gp.gibbs import native
    from msrm.gp.gibbs.start import state_of
    from msrm.gp.storage import DrawStore

    use_compilation_cache()
    recording, _ = msrm.simulate(features=features, seconds=seconds)
    lag = msrm.Free(0.5, bounds=(-1.0, 2.0), prior=msrm.Normal(0.5, 1.0))
    responses = {
        "brain": msrm.Identity(),
        "rating": msrm.Gaussian(width=0.6, lag=lag),
        "physiology": msrm.Gaussian(width=0.8, lag=lag),
    }
    fit = msrm.GPMSRM(3, responses, edges="trim", device="cpu", n_starts=1, progress=False).fit(recording)
    likelihood, _ = fit.prepared(recording, reduce=True)
    specification, layout = likelihood.specification, likelihood.nodes
    start = state_of(specification, layout, fit.model_.parameters)
    backend = sampling._grid_backend(likelihood, start, sampling._VARIATION * fit.likelihood_tolerance)
    run = native.NativeGibbsRun(specification, layout, backend, start)
    with tempfile.TemporaryDirectory() as folder:
        store = DrawStore.create(Path(folder) / "run", {})
        together = native._Chains(run, store, chains, 0, 10**6, seed)
        together._advance(native._SWEEPS)
        together.buffer.clear()
        gate.with_name(f"{gate.name}.ready.{os.getpid()}").touch()
        while not gate.exists():
            time.sleep(0.01)
        begin = time.perf_counter()
        for _ in range(dispatches):
            together._advance(native._SWEEPS)
        took = time.perf_counter() - begin
    noise = np.concatenate([part["noise"] for part in together.buffer], axis=1)
    return {
        "sweeps_a_second": chains * dispatches * native._SWEEPS / took,
        "seconds": took,
        "digest": hashlib.sha256(noise.tobytes()).hexdigest(),
    }


def together(cards: list[int], seeds: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One process a card, all begun at once."""
    with tempfile.TemporaryDirectory() as folder:
        gate, processes = Path(folder) / "gate", []
        for place, (card, seed) in enumerate(zip(cards, seeds, strict=True)):
            own = os.environ | {"CUDA_VISIBLE_DEVICES": str(card), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            command = [sys.executable, __file__, "--work", str(seed), "--gate", str(gate), "--out", f"{folder}/{place}"]
            command += ["--chains", str(arguments.chains), "--dispatches", str(arguments.dispatches)]
            command += ["--features", str(arguments.features), "--seconds", str(arguments.seconds)]
            processes.append(subprocess.Popen(command, env=own))
        while len(list(Path(folder).glob("gate.ready.*"))) < len(cards):
            if any(process.poll() is not None for process in processes):
                raise SystemExit("a process ended before it was ready; its error is above")
            time.sleep(0.05)
        gate.touch()
        if any(process.wait() for process in processes):
            raise SystemExit("a process failed; its error is above")
        return [json.loads(Path(f"{folder}/{place}").read_text()) for place in range(len(cards))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chains", type=int, default=16, help="of each process")
    parser.add_argument("--dispatches", type=int, default=40)
    parser.add_argument("--features", type=int, default=360)
    parser.add_argument("--seconds", type=float, default=453.6)
    parser.add_argument("--cards", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        found = work(
            arguments.work,
            arguments.chains,
            arguments.dispatches,
            arguments.features,
            arguments.seconds,
            arguments.gate,
        )
        arguments.out.write_text(json.dumps(found))
        return
    first, second = arguments.cards
    alone = together([first], [0], arguments)
    other = together([second], [0], arguments)
    both = together([first, second], [0, 1], arguments)
    ratio = sum(one["sweeps_a_second"] for one in both) / alone[0]["sweeps_a_second"]
    report = {
        "one_card": alone,
        "the_other_card": other,
        "two_cards": both,
        "ratio": ratio,
        "wanted": WANTED,
        "same_chain_on_both_cards": len({alone[0]["digest"], other[0]["digest"], both[0]["digest"]}) == 1,
    }
    text = json.dumps(report, indent=1)
    print(text)
    arguments.out.write_text(text + "\n")
    if ratio < WANTED:
        raise SystemExit(f"two cards give {ratio:.2f} times one, {WANTED} were wanted")


if __name__ == "__main__":
    main()
