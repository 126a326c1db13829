"""Time msrm on a recording made by the workload generator, with the settings that the peer is timed with.

    python benchmarks/ours.py r rec.npz          # R-MSRM, to convergence
    python benchmarks/ours.py gradient rec.npz   # warm objective + gradient
    python benchmarks/ours.py map rec.npz        # complete MAP

Prints one JSON object. Import time is not counted, compilation is.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np

import msrm

RESPONSES = {
    "brain": msrm.Identity(),
    "rating": msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.5, 1.5), prior=msrm.Normal(0.5, 1.0))),
    "physiology": msrm.Gaussian(
        width=msrm.Free(0.6, bounds=(0.3, 1.5), prior=msrm.LogNormal(float(np.log(0.6)), 0.5)),
        lag=msrm.Free(0.5, bounds=(-1.0, 2.0), prior=msrm.Normal(0.5, 1.0)),
    ),
}
# The peer's R-MSRM has no priors on responses.
R_RESPONSES = {
    "brain": msrm.Identity(),
    "rating": msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.5, 1.5))),
    "physiology": msrm.Gaussian(
        width=msrm.Free(0.6, bounds=(0.3, 1.5)),
        lag=msrm.Free(0.5, bounds=(-1.0, 2.0)),
    ),
}


def load(path: str, shifts: dict[str, float] | None = None) -> msrm.Recording:
    """The recording of an .npz; ``shifts`` moves a participant's brain clock by seconds."""
    data: dict[str, dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]] = {}
    with np.load(path) as archive:
        for key in archive.files:
            if key.startswith("values/"):
                _, participant, run, modality = key.split("/")
                times = archive["times/" + key.removeprefix("values/")]
                if shifts and modality == "brain":
                    times = times + shifts.get(participant, 0.0)
                data.setdefault(participant, {}).setdefault(run, {})[modality] = (archive[key], times)
    return msrm.Recording.from_dict(data)


def fit_r(recording: msrm.Recording, arguments: argparse.Namespace) -> dict[str, object]:
    start = time.perf_counter()
    fit = msrm.RMSRM(n_factors=3, latent_step=0.9, responses=R_RESPONSES, edges="trim", seed=0).fit(recording)
    return {
        "seconds": time.perf_counter() - start,
        "iterations": fit.n_iter_,
        "converged": fit.converged_,
        "objective": fit.objective_,
        "responses": {name: float(v) for name, v in fit.parameters_.items() if name.startswith("response/")},
    }


def gp(**settings: object) -> "msrm.GPMSRM":
    """GP-MSRM in the peer's setting."""
    priors = msrm.Priors(noise=msrm.LogNormal(-0.5, 1.0), loading_sd=1.0, offset_sd=1.0)
    return msrm.GPMSRM(
        n_factors=3, responses=RESPONSES, length_scale=3.0, edges="trim", priors=priors, seed=0, **settings
    )


def time_gradient(recording: msrm.Recording, arguments: argparse.Namespace) -> dict[str, object]:
    model = gp(likelihood=arguments.likelihood)
    rng = np.random.default_rng(1)
    parameters: dict[str, np.ndarray | float] = {}
    for participant, modality in recording.pairs:
        features = len(recording.features(participant, modality))
        parameters[f"loading/{participant}/{modality}"] = rng.normal(0.0, 0.6, (features, 3))
        parameters[f"offset/{participant}/{modality}"] = np.zeros(features)
        parameters[f"noise/{participant}/{modality}"] = 0.5
    parameters |= {"response/rating/lag": 0.0, "response/physiology/width": 0.6, "response/physiology/lag": 0.5}
    start = time.perf_counter()
    evaluator = model.evaluator(recording)
    prepare = time.perf_counter() - start
    point = evaluator.reduced(parameters)
    seconds = []
    for _ in range(arguments.repeats + 1):
        start = time.perf_counter()
        result = evaluator.objective_and_gradient(point)
        seconds.append(time.perf_counter() - start)
    return {
        "prepare_seconds": prepare,
        "first_seconds": seconds[0],
        "warm_seconds": float(np.median(seconds[1:])),
        "objective": float(result[0]),
        "likelihood": evaluator.describe(),
    }


def fit_map(recording: msrm.Recording, arguments: argparse.Namespace) -> dict[str, object]:
    start = time.perf_counter()
    fit = gp(likelihood=arguments.likelihood).fit(recording)
    return {
        "seconds": time.perf_counter() - start,
        "objective": float(fit.objective_),
        "likelihood_error": float(fit.likelihood_error_),
        "iterations": int(fit.n_iter_),
        "converged": bool(fit.converged_),
        "responses": {name: float(v) for name, v in fit.parameters_.items() if name.startswith("response/")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("r", "gradient", "map"))
    parser.add_argument("recording")
    parser.add_argument("--likelihood", default="auto")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--four-clocks", action="store_true", help="shift three participants' brain clocks")
    arguments = parser.parse_args()
    shifts = {"p2": 0.37, "p3": 0.81, "p4": 1.13} if arguments.four_clocks else None
    recording = load(arguments.recording, shifts)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = {"r": fit_r, "gradient": time_gradient, "map": fit_map}[arguments.what](recording, arguments)
    report["peak_above_data_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps({"what": arguments.what, "recording": Path(arguments.recording).name, **report}))


if __name__ == "__main__":
    main()
