"""A real recording: R-MSRM with everything chosen inside runs 1 to 3, scored once on run 4, beside the baselines.

    python benchmarks/forrest.py FOLDER [--factors 3 6 10] [--jobs 2]

FOLDER is a BIDS folder with two panels' emotion ratings and the film's audio and visual features in four runs. Panel
``av``'s emotion in run 4 is predicted from everything else; R^2 as everywhere in msrm, over rows that are complete and
supported. Prints one JSON object: default penalties (as the peer is timed), then chosen ones.
"""

import argparse
import json
import time
import warnings

import numpy as np

import msrm

RESPONSES = {
    "emotion": msrm.Gaussian(width=1.0, lag=msrm.Free(1.0, bounds=(-4.0, 6.0))),
    "audio": msrm.Identity(),
    "visual": msrm.Identity(),
}
TARGET = {"av": ["emotion"]}


def r2(fit: msrm.RMSRM, training: msrm.Recording, test: msrm.Recording) -> tuple[float, int]:
    """R^2 over complete, supported rows and features that vary in training, in training sds; and the rows."""
    stream = test.stream("av", "run-4", "emotion")
    predicted = fit.predict(test, targets=TARGET, source="both")["av/run-4/emotion"].to_dataset()
    known = np.concatenate([one.values for one in training.streams("av", modality="emotion")])
    known = known[np.isfinite(known).all(axis=1)]
    mean, sd = known.mean(axis=0), known.std(axis=0)
    rows = np.isfinite(stream.values).all(axis=1) & predicted["supported"].values
    scored = np.ix_(rows, sd > 0)
    error = ((stream.values - predicted["mean"].values)[scored] / sd[sd > 0]) ** 2
    nothing = ((stream.values - mean)[scored] / sd[sd > 0]) ** 2
    return float(1.0 - error.sum() / nothing.sum()), int(rows.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--factors", type=int, nargs="+", default=[3, 6, 10])
    parser.add_argument("--jobs", type=int, default=-1)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", msrm.RecordingWarning)
    recording = msrm.read_bids(arguments.folder, task="movie")
    training, test = recording.select(runs=["run-1", "run-2", "run-3"]), recording.select(runs=["run-4"])
    start = time.perf_counter()
    given = msrm.RMSRM(3, latent_step=1.0, responses=RESPONSES, seed=0).fit(training)
    report: dict[str, object] = {"default_seconds": time.perf_counter() - start}
    report["default_r2"], report["rows"] = r2(given, training, test)
    start = time.perf_counter()
    chosen = msrm.RMSRM(
        3,
        latent_step=1.0,
        responses=RESPONSES,
        penalties={"n_factors": arguments.factors, "targets": TARGET},
        n_jobs=arguments.jobs,
        seed=0,
    ).fit(training)
    report |= {"chosen_seconds": time.perf_counter() - start, "chosen": chosen.penalties_}
    report["chosen_inner_r2"] = float(chosen.cv_results_["r2"].max())
    report["candidates"] = int(chosen.cv_results_.sizes["candidate"])
    report["chosen_r2"], _ = r2(chosen, training, test)
    scores = msrm.score(chosen, test, training=training, targets=TARGET, source="both", n_shifts=200)
    report["score_r2"] = {str(k): float(v) for k, v in scores["r2"].isel(stream=0).to_series().items()}
    print(json.dumps(report, default=float))


if __name__ == "__main__":
    main()
