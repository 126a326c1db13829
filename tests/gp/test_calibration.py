"""New participants: the optimum of their own parameters at everything else held, by brute force."""

from functools import lru_cache

import numpy as np
import pytest
from gp_oracles import IMPULSE, functional_covariance, gaussian_functional, normal_log_density
from scipy.optimize import minimize
from scipy.stats import lognorm, norm

import msrm
from msrm.gp import GPMSRM

LENGTH_SCALE = 2.5
RESPONSES = {
    "brain": msrm.Identity(),
    "rating": msrm.Gaussian(width=0.6, lag=msrm.Free(0.2, bounds=(-1.0, 1.0))),
}


@lru_cache(maxsize=4)
def covariance_of(nodes):
    return functional_covariance(nodes, LENGTH_SCALE)


def made(people="abc", runs: int = 2, seed: int = 0) -> msrm.Recording:
    rng = np.random.default_rng(seed)
    data: dict = {}
    for p in people:
        loading = {m: rng.normal(size=(2, 2)) for m in RESPONSES}
        for run in range(runs):
            for modality, period in (("brain", 1.6), ("rating", 1.2)):
                times = np.arange(0.0, 14.0, period)
                at = times[:, None] - (0.4 if modality == "rating" else 0.0)
                values = np.concatenate([np.sin(0.6 * at + run), np.cos(0.9 * at)], axis=1) @ loading[modality]
                values += 0.4 * rng.standard_normal(values.shape)
                data.setdefault(p, {}).setdefault(f"run-{run + 1}", {})[modality] = values, times
    return msrm.Recording.from_dict(data)


@pytest.fixture(scope="module")
def recording():
    return made()


def fitted(recording, **arguments):
    settings = {"length_scale": LENGTH_SCALE, "n_starts": 1, "likelihood": "dense", "progress": False, "tol": 1e-8}
    return GPMSRM(1, RESPONSES, **(settings | arguments)).fit(recording.select(participants=["a", "b"]))


def negative(streams_by_run, plain, newcomer, timescale=None) -> float:
    """-(log likelihood of everybody + log prior of the newcomer) in raw features."""
    curves = {"brain": IMPULSE, "rating": gaussian_functional(0.6, float(plain["response/rating/lag"]))}
    total = 0.0
    for streams in streams_by_run:
        y, loading, variance, nodes, index, label, t = [], [], [], [], [], [], []
        for number, s in enumerate(streams):
            name = f"{s.participant}/{s.modality}"
            data = s.values
            for n, time in enumerate(s.times):
                nodes.append((curves[s.modality], float(time)))
                for f in range(data.shape[1]):
                    index.append(len(nodes) - 1)
                    y.append(data[n, f] - plain[f"offset/{name}"][f])
                    loading.append(plain[f"loading/{name}"][f, 0])
                    variance.append(plain[f"noise/{name}"])
                    label.append(10 * number + f if s.modality == "rating" else -len(index))
                    t.append(time)
        w, v, t, label = (np.array(part) for part in (loading, variance, t, label))
        covariance = np.outer(w, w) * covariance_of(tuple(nodes))[np.ix_(index, index)]
        same = label[:, None] == label
        colour = np.exp(-np.abs(t[:, None] - t) / timescale) if timescale else np.eye(len(t))
        total += normal_log_density(np.array(y), covariance + np.where(same, v * colour, 0.0))
    for name, value in plain.items():
        if name.split("/")[1] == newcomer:
            kind = name.split("/")[0]
            total += lognorm.logpdf(value, 1.0, scale=np.exp(-0.5)) if kind == "noise" else norm.logpdf(value).sum()
    return -float(total)


CASES = {
    "white": ({}, None),
    "coloured": ({"residual_timescales": {"rating": msrm.Free(0.8, bounds=(0.2, 5.0))}}, True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_newcomer_ends_where_the_full_model_with_everybody_else_held_does(recording, case):
    arguments, coloured = CASES[case]
    fit = fitted(recording, **arguments)
    joined = fit.calibrate(recording.select(participants=["c"]))
    plain = {name: np.asarray(value, float) for name, value in joined.parameters_.items()}
    for name, value in fit.parameters_.items():
        np.testing.assert_array_equal(plain[name], value)
    streams = [recording.streams(run=run) for run in recording.runs]
    timescale = float(plain["residual_timescale/rating"]) if coloured else None
    names = [name for name in plain if name.split("/")[1] == "c"]
    shapes = [plain[name].shape for name in names]

    def unpacked(x):
        pieces = np.split(x, np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1])
        made = {name: piece.reshape(shape) for name, piece, shape in zip(names, pieces, shapes, strict=True)}
        return plain | {name: np.exp(value) if name.startswith("noise/") else value for name, value in made.items()}

    def value(x):
        return negative(streams, unpacked(x), "c", timescale)

    logs = [np.log(plain[name]) if name.startswith("noise/") else plain[name] for name in names]
    start = np.concatenate([np.ravel(piece) for piece in logs])
    here = value(start)
    # The density of the variance itself is maximized, so its logarithm only moves the search.
    slope = np.array([(value(start + e) - value(start - e)) / 2e-4 for e in 1e-4 * np.eye(len(start))])
    assert np.abs(slope).max() < 2e-2
    away = start + 0.3 * np.random.default_rng(0).standard_normal(len(start))
    found = minimize(value, away, method="L-BFGS-B", options={"maxiter": 25})
    assert found.fun > here - 1e-4


def test_statespace_calibration_is_the_dense_one(recording):
    dense, grid = fitted(recording), fitted(recording, likelihood="statespace", likelihood_tolerance=1e-3)
    one, other = (fit.calibrate(recording.select(participants=["c"])) for fit in (dense, grid))
    for name in ("loading/c/brain", "offset/c/rating", "noise/c/rating"):
        np.testing.assert_allclose(one.parameters_[name], other.parameters_[name], atol=5e-3)


def test_the_newcomer_is_predicted_from_others_and_others_stay(recording):
    fit = fitted(recording)
    joined = fit.calibrate(recording.select(participants=["c"], runs=["run-1"]))
    found = joined.predict(recording, targets={"c": ["rating"]}, source="across")["c/run-2/rating"]
    measured = recording.stream("c", "run-2", "rating").values
    assert 1.0 - np.sum((found["mean"].values - measured) ** 2) / np.sum((measured - measured.mean(0)) ** 2) > 0.4
    known = recording.select(participants=["a", "b"])
    for name in ("a/run-1/rating", "b/run-2/brain"):
        np.testing.assert_array_equal(joined.predict(known)[name]["mean"], fit.predict(known)[name]["mean"])
    assert "c" not in fit.model_.participants


def test_standardized_and_offset_newcomers(recording):
    fit = fitted(recording, standardize=True, run_offsets=("rating",))
    new = recording.select(participants=["c"])
    joined = fit.calibrate(new)
    assert set(joined.model_.standardization) == {(p, m) for p in "abc" for m in RESPONSES}
    assert "run_offset/c/run-1/rating" in joined.parameters_
    found = joined.predict(new)["c/run-1/rating"]["mean"].values
    measured = new.stream("c", "run-1", "rating").values
    assert np.sum((found - measured) ** 2) < 0.6 * np.sum((measured - measured.mean(0)) ** 2)


def test_what_cannot_be_calibrated_is_refused(recording):
    fit = fitted(recording)
    with pytest.raises(ValueError, match="Participant 'a' is in the fit already"):
        fit.calibrate(recording)
    streams = {s.run: {s.modality: (s.values, s.times)} for s in recording.streams("c", modality="rating")}
    elsewhere = msrm.Recording.from_dict({"c": {"run-7": streams["run-1"]}})
    with pytest.raises(ValueError, match="'run-7' is no run of the fit, which has run-1, run-2"):
        fit.calibrate(elsewhere)
    other = msrm.Recording.from_dict({"c": {"run-1": {"skin": streams["run-1"]["rating"]}}})
    with pytest.raises(ValueError, match="'skin' of c in run-1: the fit has no response for 'skin'"):
        fit.calibrate(other)
