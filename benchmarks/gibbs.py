"""Effective draws of the Gibbs sampler within a time budget, MAP and warm-up included.

    OPENBLAS_NUM_THREADS=1 python benchmarks/gibbs.py --features 3600 --seconds 600 --out benchmarks/gibbs_3600.json
    OPENBLAS_NUM_THREADS=1 python benchmarks/gibbs.py --recording rec.npz --seconds 600
    python benchmarks/gibbs.py --device cuda --warmup 300 --draws 1000 --out benchmarks/gibbs_cuda.json

The recording is the simulator's standard one (K = 3, one run, 453.6 s) or an .npz of the workload generator, the model
that of benchmarks/ours.py. A few timed sweeps set the number of draws, with a tenth of the budget kept in hand, unless
it is given. On a card a first call compiles, and its time is apart; the MAP comes from the CPU in either case. Bulk
ESS and R-hat are of the log likelihood, all noise variances, response parameters, offsets and squared loading norms of
every raw feature. Prints one JSON object.
"""

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from ours import gp, load

import msrm
from msrm import runtime
from msrm.diagnostics import summary
from msrm.gp import sampling
from msrm.gp.draws import Draws
from msrm.gp.gibbs.chains import light_layout
from msrm.gp.gibbs.start import state_of
from msrm.gp.gibbs.state import State
from msrm.gp.gibbs.sweep import Sweeper
from msrm.gp.raw_rows import raw_rows
from msrm.runtime import available_cores, blas_threads

PILOT_SWEEPS = 25
# Turning rotated rows back for the tree, seconds a million raw rows times draws of all chains.
ASSEMBLY = 0.25


def timed_sweeps(sweeper: Sweeper, state: State) -> float:
    """Seconds a sweep, as a chain does it."""
    rng, current, start = np.random.default_rng(0), sweeper.start(state), 0.0
    for i in range(PILOT_SWEEPS + 5):
        start = time.perf_counter() if i == 5 else start
        finished = sweeper.sweep(rng, current, tune=True)
        current = sweeper.marginal.current(finished.state, finished.design)
    return (time.perf_counter() - start) / PILOT_SWEEPS


def pilot(fit: msrm.GPMSRM, recording: msrm.Recording, workers: int) -> float:
    """Seconds a sweep with every worker busy."""
    likelihood, _ = fit.prepared(recording, reduce=True, standardization=fit.model_.standardization)
    specification, layout = likelihood.specification, likelihood.nodes
    start = state_of(specification, layout, fit.model_.parameters)
    backend = sampling._grid_backend(likelihood, start, sampling._VARIATION * fit.likelihood_tolerance)
    sweeper = Sweeper(specification, light_layout(layout), backend)
    # Forked, so that a function of this script can run in another process.
    with blas_threads(1), ProcessPoolExecutor(workers, get_context("fork")) as pool:
        jobs = [pool.submit(timed_sweeps, sweeper, start) for _ in range(workers)]
        return max(job.result() for job in jobs)


def affordable(
    fit: msrm.GPMSRM, recording: msrm.Recording, arguments: argparse.Namespace, seconds: float
) -> tuple[int, dict[str, float]]:
    """Draws of a chain within the seconds left, warm-up counted, and seconds a sweep."""
    workers = min(arguments.chains, available_cores())
    sweep_seconds = pilot(fit, recording, workers)
    rounds = -(-arguments.chains // workers)
    features = sum(len(recording.features(p, m)) for p, m in recording.pairs)
    left = 0.9 * seconds - rounds * arguments.warmup * sweep_seconds
    each = rounds * sweep_seconds + ASSEMBLY * 1e-6 * features * arguments.chains
    return int(min(max(left / each, 20), arguments.most)), {"pilot_seconds_a_sweep": sweep_seconds}


def channels(draws: Draws, key: tuple[str, str]) -> dict[str, np.ndarray]:
    """Offsets and squared loading norms of every raw feature of a pair, (chain, draw, feature)."""
    size, rows = draws.n_factors, draws.rows[key]
    pair, (n_chains, n_draws) = draws.pairs[key], rows.shape[:2]
    out = {name: np.empty((n_chains, n_draws, pair.n_features)) for name in ("offset", "loading_norm2")}
    for chain, start in product(range(n_chains), range(0, n_draws, 256)):
        part = slice(start, min(start + 256, n_draws))
        raw = raw_rows(pair, rows[chain, part], [(0, chain, draw) for draw in range(part.start, part.stop)])
        out["offset"][chain, part] = raw[..., size]
        out["loading_norm2"][chain, part] = np.square(raw[..., :size]).sum(axis=-1)
    return out


def judged(draws: Draws) -> dict[str, dict[str, Any]]:
    """Smallest bulk ESS and largest R-hat by kind of quantity."""
    posterior = draws.posterior
    found: dict[str, dict[str, Any]] = {}

    def judge(kind: str, values: np.ndarray) -> None:
        table = summary(values).table
        one = found.setdefault(kind, {"quantities": 0, "ess_bulk": np.inf, "r_hat": 0.0})
        one["quantities"] += table.sizes["quantity"]
        one["ess_bulk"] = min(one["ess_bulk"], float(table["ess_bulk"].min()))
        one["r_hat"] = max(one["r_hat"], float(table["r_hat"].max()))

    judge("log_likelihood", posterior["log_likelihood_marginal"].values)
    judge("noise", posterior["noise"].values)
    for place, name in enumerate(posterior["parameter"].values):
        judge(f"response/{name}", posterior["response"].values[..., place])
    for key in draws.rows:
        for kind, values in channels(draws, key).items():
            judge(kind, values)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--features", type=int, default=3600)
    parser.add_argument("--recording", help=".npz of the workload generator, instead of the simulator's")
    parser.add_argument("--seconds", type=float, default=600.0, help="from the fit's start to the draws")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=400)
    parser.add_argument("--most", type=int, default=4000, help="draws of a chain, at most")
    parser.add_argument("--draws", type=int, help="of a chain, instead of what the budget allows")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of the sampler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.recording:
        recording = load(arguments.recording)
    else:
        recording, _ = msrm.simulate(features=arguments.features, factors=3)
    seconds: dict[str, float] = {}
    start = last = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[name], last = now - last, now

    fit = gp(progress=False, device="cpu").fit(recording)
    fit.device = arguments.device
    lap("map")
    counts = {"chains": arguments.chains, "seed": arguments.seed, "progress": False}
    if arguments.device == "cuda":
        fit.sample(recording, warmup=0, draws=1, **counts)
        lap("first draw with compilation")
    n_draws, timing = arguments.draws, {}
    if n_draws is None:
        n_draws, timing = affordable(fit, recording, arguments, arguments.seconds - (time.perf_counter() - start))
        lap("pilot")
    with tempfile.TemporaryDirectory() as folder:
        begin = time.time()
        draws = fit.sample(recording, warmup=arguments.warmup, draws=n_draws, path=Path(folder) / "draws", **counts)
        blocks = [block.stat().st_mtime for block in Path(folder).rglob("*") if block.is_file()]
        sweeping, assembly = max(blocks) - begin, time.time() - max(blocks)
    lap("sample")
    total = time.perf_counter() - start
    found = judged(draws)
    lap("diagnostics")
    report = {
        "features": sum(len(recording.features(p, m)) for p, m in recording.pairs),
        "device": arguments.device,
        "chains": arguments.chains,
        "warmup": arguments.warmup,
        "draws": n_draws,
        "seconds": total,
        "seconds_by_phase": seconds | {"sweeps_of_sample": sweeping, "assembly_of_sample": assembly},
        "sweeps_a_second": arguments.chains * (arguments.warmup + n_draws) / sweeping,
        "step": draws.tree.attrs["step"],
        **timing,
        "map": {"objective": fit.objective_, "converged": fit.converged_},
        "acceptance": np.mean(draws.tree["sample_stats/acceptance"].values, axis=(0, 1)).tolist(),
        "smallest_ess_bulk": min(one["ess_bulk"] for one in found.values()),
        "largest_r_hat": max(one["r_hat"] for one in found.values()),
        "quantities": found,
        "machine": runtime.describe(),
    }
    text = json.dumps(report, indent=1, default=str)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
