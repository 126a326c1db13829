"""GP-MSRM on a real recording: choose factors and powers inside the training runs, then predict a held-out run.

    OPENBLAS_NUM_THREADS=1 python benchmarks/forrest_gp.py FOLDER                  # white residuals
    OPENBLAS_NUM_THREADS=1 python benchmarks/forrest_gp.py FOLDER --residuals ou   # Ornstein-Uhlenbeck residuals

FOLDER is recordings/forrest: two panels' ratings of a film (`ao` heard it, `av` saw it) and the film's sound and
picture. Runs 1 to 3 train; `av`'s emotion in run 4 is predicted from `ao`'s and the film's streams. Every candidate is
scored by the log predictive density of each training run from the other two; run 4 is read after the choice, once.
Prints one JSON object a line. With `--log FILE` candidates found there are not computed again, and `--seconds` ends a
sitting early; call it again to go on.
"""

import argparse
import json
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

import msrm

TRAINING, TEST = ("run-1", "run-2", "run-3"), "run-4"
TARGET = ("av", "emotion")
MODALITIES = ("emotion", "audio", "visual")
LEVELS = (0.5, 0.8, 0.95)
TIMESCALE = msrm.Free(5.0, bounds=(0.2, 60.0))
Record = dict[str, Any]


def candidates(arguments: argparse.Namespace) -> list[Record]:
    """Every combination of factors, length scale (s), and powers of the ratings and of the film's streams."""
    axes = arguments.factors, arguments.length_scales, arguments.powers, arguments.film_powers
    return [
        {"residuals": arguments.residuals, "factors": k, "length_scale": scale, "power": own, "film_power": film or own}
        for k, scale, own, film in product(*axes)
    ]


def model(candidate: Record, *, final: bool, tolerance: float = 20.0) -> msrm.GPMSRM:
    """The estimator of a candidate; only the last fit tries a second start and resolves its likelihood."""
    film = candidate["film_power"]
    residuals = {"white": (), "ou": MODALITIES, "ou-film": ("audio", "visual"), "ou-emotion": ("emotion",)}
    timescales = dict.fromkeys(residuals[candidate["residuals"]], TIMESCALE)
    return msrm.GPMSRM(
        candidate["factors"],
        {
            "emotion": msrm.Gaussian(width=1.0, lag=msrm.Free(1.0, bounds=(-4.0, 6.0))),
            "audio": msrm.Identity(),
            "visual": msrm.Identity(),
        },
        length_scale=candidate["length_scale"],
        standardize=True,
        powers={"emotion": candidate["power"], "audio": film, "visual": film},
        residual_timescales=timescales or None,
        likelihood="statespace",
        likelihood_tolerance=tolerance,
        n_starts=2 if final else 1,
        tol=1e-4 if final else 2e-2,
        seed=0,
        progress=False,
    )


def scores(fit: msrm.GPMSRM, training: msrm.Recording, test: msrm.Recording, run: str) -> Record:
    """Scores of the target, training sd units: rows with every feature, features that vary in training."""
    participant, modality = TARGET
    tree = fit.predict(test, targets={participant: [modality]}, source="both", noise=True)
    node = tree[f"{participant}/{run}/{modality}"].dataset
    truth = test.stream(participant, run, modality).values
    known = np.concatenate([stream.values for stream in training.streams(participant, modality=modality)])
    known = known[np.isfinite(known).all(axis=1)]
    mean, sd = known.mean(axis=0), known.std(axis=0)
    rows, varies = np.isfinite(truth).all(axis=1) & node["supported"].values, sd > 0

    def scaled(values: np.ndarray) -> np.ndarray:
        return ((values - mean) / np.where(varies, sd, 1.0))[np.ix_(rows, varies)]

    y, predicted = scaled(truth), scaled(node["mean"].values)
    spread = (np.sqrt(node["variance"].values) / np.where(varies, sd, 1.0))[np.ix_(rows, varies)]
    distance = np.abs(y - predicted) / spread
    return {
        "rows": int(rows.sum()),
        "r2": float(1.0 - np.sum((y - predicted) ** 2) / np.sum(y**2)),
        "log_density": float(norm.logpdf(y, predicted, spread).mean()),
        "log_density_of_training_mean": float(norm.logpdf(y).mean()),
        "coverage": {str(level): float(np.mean(distance <= norm.ppf(0.5 + level / 2))) for level in LEVELS},
    }


def fitted(candidate: Record, recording: msrm.Recording, runs: tuple[str, ...], test: str, **how: Any) -> Record:
    """Fit to some runs, score on another."""
    training = recording.select(runs=list(runs))
    start, cpu = time.perf_counter(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = model(candidate, **how).fit(training)
    found: Record = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    found |= scores(fit, training, recording.select(runs=[test]), test)
    found |= {
        "converged": fit.converged_,
        "evaluations": fit.n_evaluations_,
        "objective": fit.objective_,
        "likelihood_error": fit.likelihood_error_,
        "step": fit.backend_["step"],
    }
    small = ("response/", "noise/", "residual_timescale/")
    return found | {name: float(value) for name, value in fit.parameters_.items() if name.startswith(small)}


def held_out(candidate: Record, recording: msrm.Recording) -> Record:
    """Scores of each training run from the other two; the density's gain over the training mean is pooled by rows."""
    found = []
    for run in TRAINING:
        others = tuple(other for other in TRAINING if other != run)
        found.append(fitted(candidate, recording, others, run, final=False))
    gain = [one["rows"] * (one["log_density"] - one["log_density_of_training_mean"]) for one in found]
    return {
        "log_density_gain": float(sum(gain) / sum(one["rows"] for one in found)),
        "r2_by_run": [one["r2"] for one in found],
        "cpu_seconds": sum(one["cpu_seconds"] for one in found),
        "evaluations": [one["evaluations"] for one in found],
    }


def logged(path: Path | None) -> dict[str, Record]:
    """Candidates of an earlier sitting, by their description."""
    lines = [] if path is None or not path.exists() else path.read_text().splitlines()
    return {json.dumps(one["candidate"]): one for one in map(json.loads, lines) if "log_density_gain" in one}


def tell(record: Record, path: Path | None) -> None:
    print(json.dumps(record), flush=True)
    if path is not None:
        with path.open("a") as log:
            log.write(json.dumps(record) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--residuals", choices=("white", "ou", "ou-emotion", "ou-film"), default="white")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--length-scales", type=float, nargs="+", default=[20.0])
    parser.add_argument("--powers", type=float, nargs="+", default=[0.03, 0.1])
    parser.add_argument("--film-powers", type=float, nargs="+", default=[None], help="by default those of the ratings")
    parser.add_argument("--likelihood-tolerance", type=float, default=0.05, help="of the last fit, nats")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--seconds", type=float, default=np.inf)
    arguments = parser.parse_args()
    recording = msrm.read_bids(arguments.folder, task="movie")
    start, done = time.perf_counter(), logged(arguments.log)
    tried = []
    for candidate in candidates(arguments):
        record = done.get(json.dumps(candidate))
        if record is None:
            found = held_out(candidate, recording)
            tell(record := {"candidate": candidate, **found}, arguments.log)
            if time.perf_counter() - start > arguments.seconds:
                return
        tried.append(record)
    best = max(tried, key=lambda record: record["log_density_gain"])["candidate"]
    how = {"final": True, "tolerance": arguments.likelihood_tolerance}
    tell({"chosen": best, "test": fitted(best, recording, TRAINING, TEST, **how)}, arguments.log)


if __name__ == "__main__":
    main()
