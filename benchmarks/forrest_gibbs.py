"""The posterior of a real recording: convergence on invariants, and a held-out run beside the MAP's prediction.

    OPENBLAS_NUM_THREADS=1 python benchmarks/forrest_gibbs.py FOLDER --out benchmarks/forrest_gibbs.json

FOLDER is recordings/forrest (see forrest_gp.py, whose model this is): three factors, learned lag, Ornstein-Uhlenbeck
residuals with learned timescales where `--residuals` says. Runs 1 to 3 train, panel `av`'s emotion in run 4 is
predicted. With `--path` draws are kept there, and a second call goes on or extends them. Prints one JSON object.
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from forrest_gp import TEST, TRAINING, model, scores

import msrm
from msrm import runtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--residuals", choices=("white", "ou", "ou-emotion", "ou-film"), default="ou")
    parser.add_argument("--factors", type=int, default=3)
    parser.add_argument("--length-scale", type=float, default=20.0)
    parser.add_argument("--power", type=float, default=0.03)
    parser.add_argument("--film-power", type=float, default=0.03)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    # Film features that hardly vary in some run, and streams that some runs lack.
    warnings.simplefilter("ignore", UserWarning)
    recording = msrm.read_bids(arguments.folder, task="movie")
    training, test = recording.select(runs=list(TRAINING)), recording.select(runs=[TEST])
    candidate = {
        "residuals": arguments.residuals,
        "factors": arguments.factors,
        "length_scale": arguments.length_scale,
        "power": arguments.power,
        "film_power": arguments.film_power,
    }
    start = time.perf_counter()
    fit = model(candidate, final=True, tolerance=0.05).fit(training)
    map_seconds = time.perf_counter() - start
    draws = fit.sample(
        training,
        chains=arguments.chains,
        warmup=arguments.warmup,
        draws=arguments.draws,
        seed=0,
        path=arguments.path,
        resume=arguments.path is not None and arguments.path.exists(),
        progress=False,
    )
    seconds = time.perf_counter() - start - map_seconds
    summary = draws.summary()
    kinds: dict[str, dict[str, Any]] = {}
    for name in np.unique([str(label).split("[")[0] for label in summary.table["quantity"].values]):
        own = summary.table.isel(quantity=[str(q).split("[")[0] == name for q in summary.table["quantity"].values])
        kinds[str(name)] = {
            "quantities": own.sizes["quantity"],
            "smallest_ess_bulk": float(own["ess_bulk"].min()),
            "largest_r_hat": float(own["r_hat"].max()),
        }
    report = {
        "model": candidate,
        "map": {"converged": fit.converged_, "seconds": map_seconds, **scores(fit, training, test, TEST)},
        "chains": arguments.chains,
        "warmup": arguments.warmup,
        "draws": arguments.draws,
        "step": draws.tree.attrs["step"],
        "seconds": seconds,
        "posterior": scores(draws, training, test, TEST),
        "quantities": kinds,
        "verdict": summary.verdict,
        "machine": runtime.describe(),
    }
    text = json.dumps(report, indent=1, default=str)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
