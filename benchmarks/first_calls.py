"""Time the first call of each entry point that compiles: in a new process, again there, and in a process after it.

    python benchmarks/first_calls.py --out benchmarks/first_calls.json                          # on a GPU
    python benchmarks/first_calls.py --device cpu --small --entries fit --out /tmp/first.json   # a rehearsal anywhere

Every figure is seconds of one call of the public interface, with the compilation cache that users have, in a home
folder of its own that is empty for the first process and filled for those after it. Data are there and JAX has started
its devices before the call; what that takes is apart. Samplers make one draw of four chains, after a MAP from the CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENTRIES = {
    "gradient": "log_likelihood_and_gradient, state space",
    "dense": "log_likelihood_and_gradient, dense",
    "fit": "fit",
    "gibbs": 'sample, sampler="gibbs"',
    "nuts": 'sample, sampler="nuts"',
}
CALLS = 3


def entry(name: str, device: str, *, small: bool) -> Callable[[], Any]:
    """What is timed: K = 3 on the standard recording with 360 features, for NUTS and dense on a short one with 16."""
    from ours import gp

    import msrm

    short = small or name in ("nuts", "dense")
    recording, truth = msrm.simulate(features=16 if short else 360, seconds=140.0 if short else 453.6)
    settings = {"n_starts": 1, "progress": False, "likelihood": "dense" if name == "dense" else "statespace"}
    if name == "fit":
        return lambda: gp(**settings, device=device).fit(recording)
    if name in ("gradient", "dense"):
        model = gp(**settings, device=device)
        of_pairs = ("loading/", "offset/", "noise/")
        parameters = {name: value for name, value in truth.parameters.items() if name.startswith(of_pairs)}
        parameters |= {"response/rating/lag": 0.4, "response/physiology/lag": 1.0, "response/physiology/width": 0.8}
        return lambda: model.log_likelihood_and_gradient(recording, parameters)
    fit = gp(**settings, device="cpu").fit(recording)
    fit.device = device
    return lambda: fit.sample(recording, sampler=name, chains=4, warmup=0, draws=1, progress=False)


def started() -> float:
    """Seconds to import JAX and start its devices."""
    start = time.perf_counter()
    import jax

    jax.devices()
    return time.perf_counter() - start


def child(name: str, device: str, *, small: bool, home: str) -> list[float]:
    """Seconds of JAX's start and of a few calls, in a process of its own."""
    command = [sys.executable, __file__, "--child", name, "--device", device, *(["--small"] if small else [])]
    environment = os.environ | {"HOME": home}
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-600:])
    return [float(part) for part in done.stdout.splitlines()[-1].split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--entries", nargs="*", choices=ENTRIES, default=list(ENTRIES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a short recording for all, to rehearse")
    parser.add_argument("--seconds-in-all", type=float, default=500.0, help="begin no entry after this time")
    parser.add_argument("--starts", type=int, default=3, help="processes with a filled cache; the median is kept")
    parser.add_argument("--child", choices=ENTRIES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        warnings.simplefilter("ignore")
        call = entry(arguments.child, arguments.device, small=arguments.small)
        seconds = [started()]
        for _ in range(CALLS):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        print(*seconds)
        return
    from msrm import runtime

    report: dict[str, Any] = {"entries": {}, "small": arguments.small, "device": arguments.device}
    end = time.monotonic() + arguments.seconds_in_all
    for name in arguments.entries:
        if time.monotonic() > end:
            report["entries"][name] = {"skipped": "the time was over"}
            continue
        with tempfile.TemporaryDirectory() as home:
            first = child(name, arguments.device, small=arguments.small, home=home)
            later = [child(name, arguments.device, small=arguments.small, home=home) for _ in range(arguments.starts)]
        cached = sorted(one[1] for one in later)
        report["entries"][name] = {
            "call": ENTRIES[name],
            "first_s": first[1],
            "again_s": min(first[2:]),
            "first_with_filled_cache_s": cached[len(cached) // 2],
            "all_with_filled_cache_s": cached,
            "jax_start_s": [one[0] for one in (first, *later)],
        }
        print(name, json.dumps(report["entries"][name]), flush=True)
        report["machine"] = runtime.describe()
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
