"""The log density of GP-MSRM: reference answers, brute force over all scalars, every derivative, options."""

import warnings

import numpy as np
import pytest
from gp_oracles import IMPULSE, finite_difference, gaussian_functional, gp_log_likelihood

from msrm import responses as families
from msrm.gp import GPMSRM, UnitsWarning, data
from msrm.gp.likelihood import Likelihood
from msrm.gp.refinement import LikelihoodError
from msrm.nodes import usable_rows
from msrm.priors import LogNormal, Normal, Priors
from msrm.recording import Recording, RecordingWarning, open_recording
from msrm.responses import Free, Gaussian, Identity

RESPONSES = {
    "brain": Identity(),
    "rating": Gaussian(width=0.6, lag=Free(0.0, bounds=(-1.5, 1.5), prior=Normal(0.5, 1.0))),
    "physiology": Gaussian(
        width=Free(0.6, bounds=(0.3, 1.0), prior=LogNormal(np.log(0.6), 0.5)),
        lag=Free(0.5, bounds=(-1.0, 2.0), prior=Normal(0.5, 1.0)),
    ),
}
BACKENDS = ("dense", "statespace")
# What each backend may leave out of the log likelihood and, relative to its largest entry, of the gradient.
TOLERANCE = {"dense": (1e-6, 1e-6), "statespace": (0.05, 2e-2)}


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        warnings.simplefilter("ignore", UnitsWarning)
        yield


def small_recording(*, masked: bool, runs: int = 1, seed: int = 0) -> Recording:
    """Two participants, staggered and irregular clocks, 20 s: a few hundred scalars in all."""
    rng = np.random.default_rng(seed)
    data: dict = {}
    for run in range(runs):
        for participant, shift in (("p1", 0.0), ("p2", 0.45)):
            clocks = {
                "brain": np.arange(shift, 20.0, 1.8),
                "rating": np.arange(0.2, 20.0, 1.2),
                "physiology": np.sort(rng.uniform(0.0, 20.0, 10)),
            }
            for modality, features in (("brain", 4), ("rating", 2), ("physiology", 1)):
                if participant == "p2" and modality == "physiology":
                    continue
                values = rng.standard_normal((len(clocks[modality]), features))
                if masked:
                    values[rng.uniform(size=values.shape) < 0.15] = np.nan
                data.setdefault(participant, {}).setdefault(f"run-{run + 1}", {})[modality] = values, clocks[modality]
    return Recording.from_dict(data)


def some_parameters(gp: GPMSRM, recording: Recording, seed: int = 1) -> dict[str, np.ndarray]:
    """A random point within all bounds."""
    rng = np.random.default_rng(seed)
    layout = gp.prepared(recording, reduce=False)[0].layout
    out = {}
    for name, shape in layout.shapes.items():
        lower, upper = layout.bounds.get(name, (-np.inf, np.inf))
        if name.startswith("noise/"):
            out[name] = rng.uniform(0.4, 1.5, shape)
        elif np.isfinite(upper):
            out[name] = rng.uniform(0.7 * lower + 0.3 * upper, 0.3 * lower + 0.7 * upper, shape)
        elif name == "length_scale":
            out[name] = np.array(2.5)
        else:
            out[name] = rng.standard_normal(shape)
    return out


def brute_force(gp: GPMSRM, recording: Recording, parameters: dict[str, np.ndarray]) -> float:
    usable = usable_rows(recording, gp.responses, edges=gp.edges)
    streams = {
        (s.participant, s.run, s.modality): (s.values[keep], s.times[keep])
        for s in recording.streams()
        if (keep := usable.rows[s.participant, s.run, s.modality]).any()
    }
    functionals = {"brain": IMPULSE, "rating": gaussian_functional(0.6, float(parameters["response/rating/lag"]))}
    if "response/physiology/width" in parameters:
        width, lag = parameters["response/physiology/width"], parameters["response/physiology/lag"]
        functionals["physiology"] = gaussian_functional(float(width), float(lag))
    timescales = {
        modality: float(parameters.get(f"residual_timescale/{modality}", np.nan) if isinstance(fixed, Free) else fixed)
        for modality, fixed in (gp.residual_timescales or {}).items()
    }
    return gp_log_likelihood(
        streams,
        functionals,
        parameters,
        length_scale=float(parameters.get("length_scale", 3.0)),
        smoothness=gp.smoothness,
        timescales=timescales,
        powers=gp.powers,
    )


def assert_matches(gp: GPMSRM, recording: Recording, parameters: dict[str, np.ndarray], expected: float) -> None:
    error = gp.likelihood_error(recording, parameters)
    assert error.error <= gp.likelihood_tolerance
    assert abs(error.log_likelihood - expected) <= 2.0 * error.error + 1e-6
    assert abs(error.extrapolated - expected) <= 5e-3


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("row", range(6))
@pytest.mark.parametrize("backend", BACKENDS)
def test_reference_log_density_and_gradient(reference, row, backend):
    given = reference("gp.json")[row]
    recording = Recording.from_dict(reference(f"{given['recording']}.npz"))
    parameters = {name: np.array(value, float) for name, value in given["parameters"].items()}
    gp = GPMSRM(given["n_factors"], RESPONSES, edges=given["edges"], likelihood=backend)
    error = gp.likelihood_error(recording, parameters)
    assert error.error <= 0.05
    # Relative 1e-10 for the exact backend (DESIGN 4), twice its own report for the other.
    assert abs(error.log_likelihood - given["log_likelihood"]) <= max(2.0 * error.error, 1e-10 * 14_000)
    assert abs(error.extrapolated - given["log_likelihood"]) < 2e-3
    value, gradient = gp.log_likelihood_and_gradient(recording, parameters)
    assert value == error.log_likelihood
    for name, expected in given["log_likelihood_gradient"].items():
        largest = np.abs(expected).max()
        np.testing.assert_allclose(
            gradient[name], expected, atol=(1e-7 if backend == "dense" else 0.1) * largest + 1e-6, err_msg=name
        )
    # The peer cuts one loading to be positive at K = 1: its prior is log 2 higher there.
    peer = given["log_prior"] - (np.log(2.0) if given["n_factors"] == 1 else 0.0)
    assert gp.log_prior(parameters) == pytest.approx(peer, abs=1e-10)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("row", range(8))
def test_reference_of_structured_responses(reference, row):
    given = reference("structured.json")[row]
    recording = Recording.from_dict(reference("structured.npz"))
    parameters = {name: np.array(value, float) for name, value in given["parameters"].items()}
    free = {
        name: Free(float(parameters[f"response/signal/{name}"]), bounds=tuple(bounds))
        for name, bounds in given["bounds"].items()
    }
    signal = getattr(families, given["family"])(**given["fixed"], **free)
    gp = GPMSRM(
        given["n_factors"],
        {"reference": Identity(), "signal": signal},
        edges=given["edges"],
        length_scale=given["length_scale"],
        likelihood="statespace",
        likelihood_tolerance=1e-3,
    )
    assert abs(gp.log_likelihood(recording, parameters) - given["log_likelihood"]) < 1e-3


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_brute_force_over_all_scalars(size, masked, backend):
    recording = small_recording(masked=masked, runs=2 if size == 2 else 1)
    gp = GPMSRM(size, RESPONSES, likelihood=backend, edges="extend")
    parameters = some_parameters(gp, recording)
    assert_matches(gp, recording, parameters, brute_force(gp, recording, parameters))


OPTIONS = {
    "white": {},
    "ou": {"residual_timescales": {"rating": 1.7, "brain": 0.9}},
    "learned ou": {"residual_timescales": {"rating": Free(1.5, bounds=(0.3, 4.0))}},
    "powers": {"powers": {"brain": 0.4, "rating": 1.3}},
    "ou with powers": {"residual_timescales": {"rating": 1.7}, "powers": {"rating": 0.6}},
    "run offsets": {"run_offsets": ("brain", "rating")},
    "ou with run offsets": {"residual_timescales": {"rating": 1.7}, "run_offsets": ("rating",)},
    "length scale": {"length_scale": LogNormal(1.0, 0.3)},
    "matern 1/2": {"smoothness": 0.5, "likelihood_tolerance": 0.2},
    "matern 5/2": {"smoothness": 2.5},
}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_options_against_brute_force(option, masked, backend):
    recording = small_recording(masked=masked, runs=2)
    gp = GPMSRM(2, RESPONSES, likelihood=backend, **OPTIONS[option])
    parameters = some_parameters(gp, recording)
    if backend == "statespace" and option == "matern 1/2":
        error = gp.likelihood_error(recording, parameters)
        assert abs(error.log_likelihood - brute_force(gp, recording, parameters)) < 0.4  # it converges as step^2 only
    else:
        assert_matches(gp, recording, parameters, brute_force(gp, recording, parameters))


def assert_gradient(likelihood: Likelihood, parameters: dict[str, np.ndarray]) -> None:
    """Central differences along a random direction of every kind of parameter, and of every scalar."""
    rng, layout = np.random.default_rng(4), likelihood.layout
    value, gradient = likelihood.value_and_gradient(parameters)
    assert value == likelihood.value(parameters)
    assert gradient.keys() == layout.shapes.keys()
    for kind in dict.fromkeys(name if layout.shapes[name] == () else name.split("/")[0] for name in parameters):
        direction = {name: rng.standard_normal(at.shape) for name, at in parameters.items() if name.startswith(kind)}
        slope = sum(np.sum(gradient[name] * part) for name, part in direction.items())

        def along(x: np.ndarray, direction: dict[str, np.ndarray] = direction) -> float:
            return likelihood.value(parameters | {n: parameters[n] + x[0] * part for n, part in direction.items()})

        found = finite_difference(along, np.zeros(1), (0,), 1e-3)
        np.testing.assert_allclose(slope, found, rtol=1e-6, atol=1e-5, err_msg=kind)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("option", "backend"),
    [(option, "statespace") for option in OPTIONS] + [("white", "dense"), ("learned ou", "dense")],
)
@pytest.mark.parametrize("masked", [False, True])
def test_gradient_in_every_parameter(option, masked, backend):
    recording = small_recording(masked=masked, runs=2)
    gp = GPMSRM(2, RESPONSES, likelihood=backend, **OPTIONS[option])
    assert_gradient(gp.prepared(recording, reduce=False)[0], some_parameters(gp, recording))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_loadings_leave_white_noise(backend):
    recording = small_recording(masked=True)
    gp = GPMSRM(2, RESPONSES, likelihood=backend)
    parameters = some_parameters(gp, recording)
    parameters = {name: 0.0 * value if name.startswith("loading/") else value for name, value in parameters.items()}
    expected = 0.0
    for stream in recording.streams():
        name = f"{stream.participant}/{stream.modality}"
        variance = float(parameters[f"noise/{name}"])
        error = (stream.values - parameters[f"offset/{name}"])[np.isfinite(stream.values)]
        expected -= 0.5 * np.sum(error**2 / variance + np.log(2.0 * np.pi * variance))
    value, gradient = gp.log_likelihood_and_gradient(recording, parameters)
    assert value == pytest.approx(expected, rel=1e-12)
    assert np.abs(gradient["loading/p1/brain"]).max() < 1e-9  # a saddle: the sign of a loading is free


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("masked", [False, True])
def test_rotated_features_give_the_same_density(masked):
    rng = np.random.default_rng(2)
    times = np.arange(0.0, 20.0, 1.8)
    values = rng.standard_normal((len(times), 40)) + 3.0
    if masked:
        values[3:5, :25] = np.nan
    rating = np.arange(0.0, 20.0, 1.2)
    recording = Recording.from_dict(
        {"p1": {"run-1": {"brain": (values, times), "rating": (rng.standard_normal((len(rating), 2)), rating)}}}
    )
    gp = GPMSRM(2, {name: RESPONSES[name] for name in ("brain", "rating")}, likelihood="dense")
    raw, _ = gp.prepared(recording, reduce=False)
    reduced, _ = gp.prepared(recording, reduce=True)
    pair = next(pair for pair in reduced.nodes.pairs if pair.modality == "brain")
    assert pair.n_coordinates < 40
    assert pair.null_counts.sum() == 40 - pair.n_coordinates
    inside = {
        name: rng.standard_normal(shape) if shape else np.array(0.7) for name, shape in reduced.layout.shapes.items()
    }
    outside = {}
    for pair in reduced.nodes.pairs:
        name = f"{pair.participant}/{pair.modality}"
        for kind in ("loading", "offset"):
            outside[f"{kind}/{name}"] = pair.reduced.to_features(inside[f"{kind}/{name}"])
    outside = {name: outside.get(name, inside[name]) for name in raw.layout.shapes}
    assert raw.value(outside) == pytest.approx(reduced.value(inside), rel=1e-11)
    assert raw.layout.log_prior(outside) == pytest.approx(reduced.layout.log_prior(inside), rel=1e-11)
    assert_gradient(reduced, inside)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("masked", [False, True])
def test_data_that_do_not_stay_in_memory_are_read_in_every_pass(masked, monkeypatch, tmp_path):
    recording = small_recording(masked=masked, runs=2)
    recording.to_netcdf(tmp_path / "recording.nc")
    gp = GPMSRM(2, RESPONSES, likelihood="dense", run_offsets=("brain",), residual_timescales={"rating": 1.7})
    parameters = some_parameters(gp, recording)
    value, gradient = gp.log_likelihood_and_gradient(recording, parameters)
    monkeypatch.setattr(data, "RESIDENT_BYTES", 0)
    again, same = gp.log_likelihood_and_gradient(open_recording(tmp_path / "recording.nc"), parameters)
    assert again == pytest.approx(value, rel=1e-14)
    for name, expected in gradient.items():
        np.testing.assert_allclose(same[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("quiet")
def test_nodes_that_are_far_apart_stand_alone():
    values = np.array([[0.4], [np.nan], [-1.1]])
    recording = Recording.from_dict({"p1": {"r": {"brain": (values, np.array([0.0, 1.0, 300.0]))}}})
    parameters = {
        "loading/p1/brain": np.array([[0.8]]),
        "offset/p1/brain": np.array([0.1]),
        "noise/p1/brain": np.array(0.5),
    }
    total = 0.8**2 + 0.5
    for backend in BACKENDS:
        gp = GPMSRM(1, {"brain": Identity()}, likelihood=backend)
        expected = -0.5 * ((0.3**2 + 1.2**2) / total + 2.0 * np.log(2.0 * np.pi * total))
        assert gp.log_likelihood(recording, parameters) == pytest.approx(expected, abs=1e-12)


@pytest.mark.usefixtures("quiet")
def test_standardize_is_the_model_of_the_scaled_data():
    recording = small_recording(masked=True, runs=2)
    scaled: dict = {}
    for participant, modality in recording.pairs:
        streams = recording.streams(participant, modality=modality)
        every = np.concatenate([stream.values for stream in streams])
        mean, sd = np.nanmean(every, axis=0), np.nanstd(every, axis=0)
        for stream in streams:
            pair = (stream.values - mean) / sd, stream.times
            scaled.setdefault(participant, {}).setdefault(stream.run, {})[modality] = pair
    plain, standard = (GPMSRM(2, RESPONSES, likelihood="dense", standardize=flag) for flag in (False, True))
    parameters = some_parameters(plain, recording)
    expected = plain.log_likelihood(Recording.from_dict(scaled), parameters)
    assert standard.log_likelihood(recording, parameters) == pytest.approx(expected, rel=1e-12)


def test_units_that_do_not_meet_the_priors_draw_a_warning():
    times = np.arange(0.0, 20.0, 1.8)
    rng = np.random.default_rng(0)
    gp = GPMSRM(1, {"heart": Identity()}, likelihood="dense")
    parameters = {
        "loading/p1/heart": np.ones((2, 1)),
        "offset/p1/heart": np.zeros(2),
        "noise/p1/heart": np.array(1.0),
    }
    for scale, level in ((30.0, 0.0), (0.01, 0.0), (1.0, 70.0)):
        values = level + scale * rng.standard_normal((len(times), 2))
        recording = Recording.from_dict({"p1": {"r": {"heart": (values, times)}}})
        with pytest.warns(UnitsWarning, match=r"'heart' of p1: .*Use standardize=True"):
            gp.log_likelihood(recording, parameters)
        GPMSRM(1, {"heart": Identity()}, standardize=True).log_likelihood(recording, parameters)
    recording = Recording.from_dict({"p1": {"r": {"heart": (rng.standard_normal((len(times), 2)), times)}}})
    gp.log_likelihood(recording, parameters)


@pytest.mark.usefixtures("quiet")
def test_parameters_that_do_not_fit_are_refused():
    recording = small_recording(masked=False)
    gp = GPMSRM(2, RESPONSES)
    parameters = some_parameters(gp, recording)
    cases = {
        r"missing \['noise/p1/brain'\]": {k: v for k, v in parameters.items() if k != "noise/p1/brain"},
        r"unknown \['loading/p9/brain'\]": {**parameters, "loading/p9/brain": np.ones((4, 2))},
        r"'loading/p1/brain': shape \(4, 3\), wanted \(4, 2\)": {**parameters, "loading/p1/brain": np.ones((4, 3))},
        "'offset/p1/brain': 1 values are not finite": {**parameters, "offset/p1/brain": np.array([0, 0, np.nan, 0])},
        "'response/rating/lag': 1.7 is outside its bounds": {**parameters, "response/rating/lag": np.array(1.7)},
        "'noise/p1/brain': a variance must be positive": {**parameters, "noise/p1/brain": np.array(0.0)},
    }
    for message, bad in cases.items():
        with pytest.raises(ValueError, match=message):
            gp.log_likelihood(recording, bad)
    assert gp.log_prior({**parameters, "response/rating/lag": np.array(1.7)}) == -np.inf
    with pytest.raises(ValueError, match="missing"):
        gp.log_prior({"loading/p1/brain": np.ones((4, 2))})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_factors": 0}, "n_factors must be a positive integer, found 0"),
        ({"n_factors": True}, "n_factors must be a positive integer, found True"),
        ({"standardize": "no"}, "standardize must be True or False, found 'no'"),
        ({"edges": "cut"}, "edges must be 'extend' or 'trim', found 'cut'"),
        ({"likelihood": "fast"}, "likelihood must be one of auto, dense, statespace, found 'fast'"),
        ({"smoothness": 2.0}, "smoothness must be 0.5, 1.5 or 2.5"),
        ({"likelihood_tolerance": 0.0}, "likelihood_tolerance must be positive"),
        ({"length_scale": -1.0}, "length_scale must be positive seconds"),
        ({"length_scale": Normal(3.0, 1.0)}, "length_scale: .* reaches below zero"),
        ({"powers": {"brain": 0.0}}, r"powers\['brain'\] must be a positive number"),
        ({"powers": {"pulse": 1.0}}, "powers names 'pulse'; responses has brain, rating"),
        ({"residual_timescales": {"brain": 0.0}}, "must be positive seconds or Free, found 0.0"),
        ({"run_offsets": ("pulse",)}, "run_offsets names 'pulse'"),
        ({"run_offsets": True}, r"run_offsets must be a tuple of modalities, .*found True"),
        ({"powers": 0.5}, "powers must be {modality: a positive number}, found 0.5"),
        ({"powers": {"brain": "x"}}, r"powers\['brain'\] must be a positive number, found 'x'"),
        ({"residual_timescales": ["brain"]}, "residual_timescales must be {modality: seconds or Free}"),
        ({"residual_timescales": {"brain": -1.0}}, r"residual_timescales\['brain'\] must be positive seconds or Free"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    gp = GPMSRM(**{"n_factors": 2, "responses": RESPONSES, **arguments})
    with pytest.raises((TypeError, ValueError), match=message):
        _ = gp.specification


def test_separate_responses_are_refused_by_the_gp():
    response = Gaussian(width=0.6, lag=Free(0.0, bounds=(-1.0, 1.0)), pooling="separate")
    with pytest.raises(ValueError, match="pooling='separate' is available in RMSRM"):
        _ = GPMSRM(2, {"rating": response}).specification


@pytest.mark.usefixtures("quiet")
def test_auto_says_why():
    gp = GPMSRM(2, RESPONSES)
    values = np.arange(12.0)[:, None] % 5
    short = Recording.from_dict({"p1": {"r": {"brain": (values, 1.8 * np.arange(12))}}})
    _, choice = gp.prepared(short, reduce=False)
    assert choice.name == "dense"
    assert "dense (order" in choice.reason
    assert "statespace" in choice.reason
    long = Recording.from_dict(
        {"p1": {"r": {"brain": (np.zeros((2000, 1)) + np.arange(2000)[:, None] % 7, 1.8 * np.arange(2000))}}}
    )
    _, choice = gp.prepared(long, reduce=False)
    assert choice.name == "statespace"


def test_priors_constants_count_every_feature():
    gp = GPMSRM(1, {"brain": Identity()}, priors=Priors(loading_sd=0.5, offset_sd=2.0))
    parameters = {
        "loading/p1/brain": np.array([[0.3], [-0.2]]),
        "offset/p1/brain": np.array([1.0, 0.0]),
        "noise/p1/brain": np.array(0.8),
    }
    expected = sum(Normal(0.0, 0.5).log_density(w) for w in (0.3, -0.2))
    expected += sum(Normal(0.0, 2.0).log_density(b) for b in (1.0, 0.0)) + LogNormal(-0.5, 1.0).log_density(0.8)
    assert gp.log_prior(parameters) == pytest.approx(float(expected), abs=1e-12)


def test_estimator_contract():
    gp = GPMSRM(2, RESPONSES, length_scale=2.0)
    assert gp.get_params()["responses"] is RESPONSES
    clone = GPMSRM(**gp.get_params())
    assert clone.get_params() == gp.get_params()
    assert clone.set_params(n_factors=3).n_factors == 3
    with pytest.raises(ValueError, match="has no argument 'factors'"):
        gp.set_params(factors=2)
    assert LikelihoodError(1.0, 1.5, 0.9).error == 0.5
