"""Time and memory of `msrm.diagnostics.summary` at the recorded scale, beside ArviZ on a part of it.

    OPENBLAS_NUM_THREADS=1 python benchmarks/diagnostics.py --out benchmarks/diagnostics.json

Draws are autoregressive (0.5), 57,758 quantities x 4 chains x 1,200 draws. ArviZ is timed on `--arviz` quantities and
scaled up; the columns of both must agree to 1e-10. Prints one JSON object.
"""

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import arviz
import numpy as np
import xarray as xr
from scipy.signal import lfilter

from msrm import runtime
from msrm.diagnostics import summary


def autoregressive(quantities: int, chains: int, draws: int) -> np.ndarray:
    """(chain, draw, quantity), made in place of the normals: as large as the draws, no larger."""
    rng, out = np.random.default_rng(0), np.empty((chains, draws, quantities))
    for chain in out:
        for start in range(0, quantities, 4096):
            part = slice(start, start + 4096)
            chain[:, part] = lfilter([1.0], [1.0, -0.5], rng.standard_normal(chain[:, part].shape), axis=0)
    return out


def compared(draws: np.ndarray, table: xr.Dataset) -> dict[str, Any]:
    """ArviZ on the first quantities: CPU seconds and the largest relative difference of bulk ESS, tail ESS, R-hat."""
    data = xr.Dataset({"x": (("chain", "draw", "quantity"), draws)})
    start = time.process_time()
    theirs = {
        "ess_bulk": arviz.ess(data, method="bulk")["x"].values,
        "ess_tail": arviz.ess(data, method="tail", prob=(0.11, 0.89))["x"].values,
        "r_hat": arviz.rhat(data)["x"].values,
    }
    seconds = time.process_time() - start
    ours = table.isel(quantity=slice(draws.shape[2]))
    apart = {name: float(np.max(np.abs(ours[name].values / values - 1))) for name, values in theirs.items()}
    return {"quantities": draws.shape[2], "cpu_seconds": seconds, "largest_relative_difference": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quantities", type=int, default=57_758)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--draws", type=int, default=1200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arviz", type=int, default=500, help="quantities")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    draws = autoregressive(arguments.quantities, arguments.chains, arguments.draws)
    data = xr.Dataset({"x": (("chain", "draw", "quantity"), draws)})
    wall, cpu = [], []
    for _ in range(arguments.repeats):
        start, used = time.perf_counter(), time.process_time()
        table = summary(data).table
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    report = {
        "shape": [arguments.quantities, arguments.chains, arguments.draws],
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "draws_gb": draws.nbytes / 1e9,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }
    report["arviz"] = compared(draws[:, :, : arguments.arviz], table)
    text = json.dumps(report | {"machine": runtime.describe()}, indent=1, default=str)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
