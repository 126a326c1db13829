"""Importance-corrected Laplace on a problem of eight parameters, and what both samplers are compared with it by."""

import numpy as np
import pytest

import msrm


def laplace_problem() -> tuple[msrm.GPMSRM, msrm.Recording]:
    """One Identity and one filtered feature: eight parameters, data sharp enough for one mode up to sign."""
    rng = np.random.default_rng(4)
    slow, fast = 0.8 * np.arange(14), 0.7 * np.arange(16) + 0.1
    noisy = [1.2 * np.sin(t / 1.3) + 0.2 * rng.standard_normal(t.shape) for t in (slow, fast)]
    streams = {"brain": (noisy[0][:, None] + 0.3, slow), "rating": (noisy[1][:, None], fast)}
    responses = {
        "brain": msrm.Identity(),
        "rating": msrm.Gaussian(
            width=msrm.Free(0.4, bounds=(0.15, 1.0), prior=msrm.LogNormal(-0.9, 0.3)),
            lag=msrm.Free(0.0, bounds=(-1.0, 1.0), prior=msrm.Normal(0.0, 0.3)),
        ),
    }
    priors = msrm.Priors(noise=msrm.LogNormal(-3.0, 0.5), loading_sd=1.0, offset_sd=0.5)
    model = msrm.GPMSRM(1, responses, length_scale=2.0, priors=priors, likelihood="dense", n_starts=2, progress=False)
    return model, msrm.Recording.from_dict({"p1": {"run-1": streams}})


LOGARITHMIC = ("noise/", "response/rating/width")


def importance_moments(
    fit: msrm.GPMSRM, recording: msrm.Recording, count: int
) -> dict[str, tuple[float, float, float]]:
    """Mean, its standard error and sd of invariants, by self-normalized importance sampling around the MAP.

    Proposals are a multivariate t with the Laplace covariance widened, in coordinates with logarithms of variances and
    the width; the half where the first loading keeps its sign stands for both.
    """
    names, rng = list(fit.parameters_), np.random.default_rng(5)
    # Two features are never rotated, so parameters are those of the likelihood.
    likelihood, _ = fit.prepared(recording, reduce=False)
    logs = np.array([name.startswith(LOGARITHMIC) for name in names])
    centre = np.array([float(np.ravel(fit.parameters_[name])[0]) for name in names])
    centre[logs] = np.log(centre[logs])

    def density(x: np.ndarray) -> float:
        values = np.where(logs, np.exp(np.where(logs, x, 0.0)), x)
        parameters = {n: np.reshape(v, np.shape(fit.parameters_[n])) for n, v in zip(names, values, strict=True)}
        lag, width = parameters["response/rating/lag"], parameters["response/rating/width"]
        if not (-1.0 < lag < 1.0 and 0.15 < width < 1.0) or x[0] * centre[0] < 0:
            return -np.inf
        return likelihood.value(parameters) + likelihood.layout.log_prior(parameters) + float(x[logs].sum())

    d, h = len(centre), 1e-3
    hessian = np.empty((d, d))
    units = h * np.eye(d)
    for i in range(d):
        for j in range(i + 1):
            corners = [s * t * density(centre + s * units[i] + t * units[j]) for s in (1, -1) for t in (1, -1)]
            hessian[i, j] = hessian[j, i] = sum(corners) / (4 * h * h)
    root, freedom = np.linalg.cholesky(np.linalg.inv(-hessian)), 6.0
    standard = rng.standard_normal((count, d)) / np.sqrt(rng.chisquare(freedom, (count, 1)) / freedom) * 1.2
    points = centre + standard @ root.T
    log_proposal = -0.5 * (freedom + d) * np.log1p(np.sum((standard / 1.2) ** 2, axis=1) / freedom)
    log_weight = np.array([density(x) for x in points]) - log_proposal
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    assert 1 / np.sum(weight**2) > 0.1 * count
    out = {}
    for i, name in enumerate(names):
        values = points[:, i] ** 2 if name.startswith("loading") else points[:, i]
        mean = float(weight @ values)
        apart = values - mean
        out[name] = mean, float(np.sqrt(np.sum((weight * apart) ** 2))), float(np.sqrt(weight @ apart**2))
    return out


def check_moments(draws: msrm.Draws, fit: msrm.GPMSRM, recording: msrm.Recording, count: int = 4000) -> None:
    """Means within 4.5 standard errors and sds within 12 % of those of importance sampling, for every parameter."""
    posterior = draws.posterior
    found = {}
    for place, modality in enumerate(("brain", "rating")):
        found[f"loading/p1/{modality}"] = posterior["loading_norm2"].values[..., place]
        found[f"offset/p1/{modality}"] = posterior["offset"].values[..., place]
        found[f"noise/p1/{modality}"] = np.log(posterior["noise"].values[..., place])
    for name, values in zip(
        posterior["parameter"].values, np.moveaxis(posterior["response"].values, -1, 0), strict=True
    ):
        found[f"response/{name}"] = np.log(values) if name.endswith("width") else values
    exact = importance_moments(fit, recording, count)
    table = msrm.diagnostics.summary(np.moveaxis(np.array(list(found.values())), 0, -1)).table
    for i, name in enumerate(found):
        mean, error, sd = exact[name]
        spread = float(np.hypot(error, table["mcse_mean"][i]))
        assert abs(float(table["mean"][i]) - mean) < 4.5 * spread, name
        assert float(table["sd"][i]) == pytest.approx(sd, rel=0.12), name
