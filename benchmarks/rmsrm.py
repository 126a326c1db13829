"""How R-MSRM's cost grows: with features, with missing entries, and on a recording that does not fit in memory.

    python benchmarks/rmsrm.py features recording.py     # time of an evaluation and of a fit, 360 to 36,000 features
    python benchmarks/rmsrm.py masked recording.py       # the same with 8 % of the entries missing, every mask unique
    python benchmarks/rmsrm.py large rec.nc              # 4 participants x 200,000 features x 1,000 volumes, 6.4 GB
    python benchmarks/rmsrm.py forrest FOLDER            # three runs of a real recording, K = 3

`recording.py` is the workload generator. Prints one JSON object a line; times are the least of several repeats.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import msrm
from msrm.recording_file import RecordingWriter
from msrm.regularized.objective import Objective
from msrm.regularized.position import position
from msrm.regularized.problem import build_problem
from msrm.regularized.settings import checked_settings
from msrm.runtime import blas_threads
from msrm.stream import make_stream

RESPONSES = {
    "brain": msrm.Identity(),
    "rating": msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.5, 1.5))),
    "physiology": msrm.Gaussian(width=msrm.Free(0.6, bounds=(0.3, 1.5)), lag=msrm.Free(0.5, bounds=(-1.0, 2.0))),
}


def least(work: Callable[[], Any], repeats: int) -> float:
    """The least wall time of several repeats, seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def estimator() -> msrm.RMSRM:
    return msrm.RMSRM(3, latent_step=0.9, responses=RESPONSES)


def generated(generator: str, features: int, missing: float) -> msrm.Recording:
    spec = importlib.util.spec_from_file_location("workload_recording", generator)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made, data = module.make(features=features, missing=missing), {}
    for key, values in made.items():
        if key.startswith("values/"):
            _, participant, run, modality = key.split("/")
            pair = (values, made["times/" + key.removeprefix("values/")])
            data.setdefault(participant, {}).setdefault(run, {})[modality] = pair
    return msrm.Recording.from_dict(data)


def growth(generator: str, counts: list[int], missing: float) -> None:
    """Time of one evaluation with its metric, of the preparation, and of a fit, by number of features."""
    for features in counts:
        recording = generated(generator, features, missing)
        settings = checked_settings(estimator().get_params())
        fit = estimator().fit(recording)
        report = {
            "features": features,
            "missing": missing,
            "prepare_seconds": least(partial(build_problem, recording, settings), 3),
            "evaluation_seconds": least(_evaluation(Objective(build_problem(recording, settings)[0])), 30),
            "fit_seconds": least(partial(estimator().fit, recording), 3),
            "iterations": fit.n_iter_,
            "objective": fit.objective_,
        }
        print(json.dumps(report), flush=True)


def _evaluation(objective: Objective) -> Callable[[], None]:
    """An evaluation at fresh response values each time, as in a search: nothing is taken from the last one."""
    loading = np.random.default_rng(0).standard_normal((objective.problem.n_columns, 3))
    turns = iter(range(10**6))

    def evaluate() -> None:
        with blas_threads(1):
            point = position(objective, loading, objective.problem.filters.start + 1e-6 * next(turns))
            point.inverse_metric(point.gradient)

    return evaluate


def write_large(path: Path, features: int = 200_000, volumes: int = 1_000, participants: int = 4) -> None:
    """Three smooth shared factors and unit noise, written a participant at a time."""
    rng = np.random.default_rng(0)
    times = 1.5 * np.arange(volumes)
    path_values = np.stack([np.convolve(rng.standard_normal(volumes + 8), np.hanning(9), "valid") for _ in range(3)], 1)
    with RecordingWriter(path) as writer:
        for i in range(participants):
            values = path_values @ (0.3 * rng.standard_normal((3, features)))
            for start in range(0, volumes, 50):
                values[start : start + 50] += rng.standard_normal((len(values[start : start + 50]), features))
            writer.write(make_stream(f"p{i + 1}", "run-1", "brain", (values, times)))


def peak_memory() -> int:
    """Bytes of this process's memory at its peak (Linux); rusage would count the parent's, too."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmHWM"].split()[0])


def fit_large(path: Path) -> None:
    """Fit the recording of `write_large`; run in a process of its own, so that the peak memory is the fit's."""
    start = time.perf_counter()
    recording = msrm.open_recording(path)
    opened = time.perf_counter() - start
    # A squared norm grows with the features: the ridge is taken per feature.
    fit = msrm.RMSRM(3, latent_step=1.5, responses={"brain": msrm.Identity()}, loading_scaling="feature").fit(recording)
    report = {
        "open_seconds": opened,
        "fit_seconds": time.perf_counter() - start - opened,
        "peak_memory_gb": peak_memory() / 2**30,
        "file_gb": path.stat().st_size / 2**30,
        "iterations": fit.n_iter_,
        "objective": fit.objective_,
        "explained": fit.explained_variance_.values.tolist(),
    }
    print(json.dumps(report), flush=True)


def fit_forrest(folder: str) -> None:
    """Runs 1 to 3, K = 3, the peer's settings."""
    recording = msrm.read_bids(folder, task="movie")
    train = recording.select(runs=[run for run in recording.runs if not run.endswith("4")])
    lag = msrm.Free(1.0, bounds=(-4.0, 6.0))
    responses = {"emotion": msrm.Gaussian(width=1.0, lag=lag), "audio": msrm.Identity(), "visual": msrm.Identity()}
    fit = msrm.RMSRM(3, latent_step=1.0, responses=responses)
    seconds = least(lambda: fit.fit(train), 3)
    print(json.dumps({"fit_seconds": seconds, "iterations": fit.n_iter_, "objective": fit.objective_}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("features", "masked", "large", "fit-large", "forrest"))
    parser.add_argument("path", help="the workload generator, the recording to write and fit, or the folder")
    arguments = parser.parse_args()
    if arguments.what == "features":
        growth(arguments.path, [360, 3_600, 36_000], 0.0)
    elif arguments.what == "masked":
        growth(arguments.path, [360, 1_200, 3_600, 7_200], 0.08)
    elif arguments.what == "forrest":
        fit_forrest(arguments.path)
    elif arguments.what == "fit-large":
        fit_large(Path(arguments.path))
    else:
        if not Path(arguments.path).exists():
            write_large(Path(arguments.path))
        subprocess.run([sys.executable, __file__, "fit-large", arguments.path], check=True)


if __name__ == "__main__":
    main()
