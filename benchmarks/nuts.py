"""Time NUTS on a recording that the released peer's NUTS can do too: effective draws per second, everything included.

    python workload/recording.py --features 16 --factors 2 --seconds 140 --out rec.npz
    python benchmarks/nuts.py rec.npz --out benchmarks/nuts.json

The clock starts with the recording in memory: MAP, whitening, compilation, warm-up, draws and the result's assembly
count. The figure is the smallest bulk ESS over the log likelihood, all noise variances, offsets, squared loading norms
and response parameters, divided by it. The peer's own note gives 0.005 for its NUTS on such a recording (2,914 s, every
tree saturated); benchmarks/peer_nuts.py runs it until a limit.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
from ours import RESPONSES, load

import msrm

PEER = 0.005


def cpu_seconds() -> float:
    """Processor time of this process and of the workers that have ended."""
    return sum(os.times()[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recording")
    parser.add_argument("--factors", type=int, default=2)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--chain-method", choices=("sequential", "vectorized", "processes"), default="sequential")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    recording = load(arguments.recording)
    begun, begun_cpu = time.perf_counter(), cpu_seconds()
    priors = msrm.Priors(noise=msrm.LogNormal(-0.5, 1.0), loading_sd=1.0, offset_sd=1.0)
    gp = msrm.GPMSRM(arguments.factors, RESPONSES, length_scale=3.0, edges="trim", priors=priors, seed=0)
    gp.fit(recording)
    fitted = time.perf_counter()
    draws = gp.sample(
        recording,
        sampler="nuts",
        chains=arguments.chains,
        warmup=arguments.warmup,
        draws=arguments.draws,
        chain_method=arguments.chain_method,
        seed=arguments.seed,
        progress=False,
    )
    seconds, cpu = time.perf_counter() - begun, cpu_seconds() - begun_cpu
    report = draws.summary()
    stats = draws.tree["sample_stats"].to_dataset()
    least = float(report.table["ess_bulk"].min())
    figures = {
        "recording": Path(arguments.recording).name,
        "factors": arguments.factors,
        "chains": arguments.chains,
        "warmup": arguments.warmup,
        "draws": arguments.draws,
        "chain_method": arguments.chain_method,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "map_seconds": fitted - begun,
        "quantities": int(report.table.sizes["quantity"]),
        "minimum_ess_bulk": least,
        "minimum_ess_tail": float(report.table["ess_tail"].min()),
        "largest_r_hat": float(report.table["r_hat"].max()),
        "ess_per_second": least / seconds,
        "ess_per_cpu_second": least / cpu,
        "peer_note_ess_per_second": PEER,
        "times_the_peer": least / seconds / PEER,
        "saturated_trees": int(stats["reached_max_tree_depth"].sum()),
        "divergences": int(stats["diverging"].sum()),
        "mean_leapfrogs": float(stats["n_steps"].mean()),
        "tree_depths": np.unique(stats["tree_depth"].values).tolist(),
        "step_sizes": np.unique(stats["step_size"].values).round(4).tolist(),
        "bfmi": [round(float(value), 3) for value in report.sampler["bfmi"]],
    }
    print(json.dumps(figures, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
