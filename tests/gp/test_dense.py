"""The dense likelihood against the reference answers, numerical integration of the nodes' density, and differences."""

import numpy as np
import pytest

import msrm
from msrm.gp import GPMSRM


def responses_of(row):
    """The responses that shared/reference/gp.json was made with."""
    return {
        "brain": msrm.Identity(),
        "rating": msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.5, 1.5), prior=msrm.Normal(0.5, 1.0))),
        "physiology": msrm.Gaussian(
            width=msrm.Free(0.6, bounds=(0.3, 1.0), prior=msrm.LogNormal(float(np.log(0.6)), 0.5)),
            lag=msrm.Free(0.5, bounds=(-1.0, 2.0), prior=msrm.Normal(0.5, 1.0)),
        ),
    }


@pytest.fixture(scope="module")
def rows(reference):
    return {(row["recording"], row["n_factors"]): row for row in reference("gp.json")}


@pytest.mark.parametrize("recording", ["complete", "masked"])
@pytest.mark.parametrize("n_factors", [1, 2, 3])
def test_dense_reproduces_the_reference_likelihood_gradient_and_prior(reference, rows, recording, n_factors):
    row = rows[recording, n_factors]
    data = msrm.Recording.from_dict(reference(f"{recording}.npz"))
    model = GPMSRM(n_factors, responses_of(row), length_scale=row["length_scale"], edges="trim", likelihood="dense")
    value, gradient = model.log_likelihood_and_gradient(data, row["parameters"])
    assert value == pytest.approx(row["log_likelihood"], rel=1e-10)
    # Relative to the gradient's largest entry: single entries cancel.
    scale = max(np.abs(wanted).max() for wanted in row["log_likelihood_gradient"].values())
    for name, wanted in row["log_likelihood_gradient"].items():
        np.testing.assert_allclose(gradient[name], wanted, rtol=1e-8, atol=1e-8 * scale, err_msg=name)
    prior = model.log_prior(row["parameters"])
    # The reference truncates one loading to be positive at one factor: log 2.
    assert prior + (np.log(2.0) if n_factors == 1 else 0.0) == pytest.approx(row["log_prior"], abs=1e-9)


def test_sharp_data_keep_their_digits():
    # Noise of 1e-6 beside signals of 5: h' C h is 1e14 where the log density is 1e4.
    rng = np.random.default_rng(0)
    times, loading, noise = 2.0 * np.arange(8), 3.0 * rng.standard_normal((3, 4)), 1e-6
    latent = rng.standard_normal((len(times), 4))
    values = latent @ loading.T + np.sqrt(noise) * rng.standard_normal((len(times), 3))
    recording = msrm.Recording.from_dict({"p1": {"run-1": {"brain": (values, times)}}})
    model = GPMSRM(4, {"brain": msrm.Identity()}, length_scale=1.0, likelihood="dense")
    parameters = {"loading/p1/brain": loading, "offset/p1/brain": np.zeros(3), "noise/p1/brain": np.asarray(noise)}
    x = np.sqrt(3.0) * np.abs(times[:, None] - times)
    covariance = np.kron((1.0 + x) * np.exp(-x), loading @ loading.T) + noise * np.eye(values.size)
    expected = -0.5 * (
        values.ravel() @ np.linalg.solve(covariance, values.ravel()) + np.linalg.slogdet(2.0 * np.pi * covariance)[1]
    )
    value, gradient = model.log_likelihood_and_gradient(recording, parameters)
    assert value == pytest.approx(expected, abs=1e-4)
    solved = np.linalg.solve(covariance, values.ravel())
    slope = 0.5 * (solved @ solved - np.trace(np.linalg.inv(covariance)))
    assert float(gradient["noise/p1/brain"]) == pytest.approx(slope, abs=0.1)  # the difference of terms of 1e7
