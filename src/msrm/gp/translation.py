"""The R-MSRM fit as a start of the MAP (DESIGN 5): loading x feature sd x latent sd, offset the mean, v the residual.

Never the only start: R-MSRM's optimum can sit at a bound of a response parameter where the GP's does not.
"""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from msrm.gp.fitted import Standardization, starting_length_scale
from msrm.gp.likelihood import Likelihood
from msrm.gp.starts import Start, parameters_at_rest
from msrm.quasi_newton import INTERRUPTED
from msrm.recording import Recording
from msrm.regularized import RMSRM, ConvergenceWarning
from msrm.responses import Free, Response

_NAME = "R-MSRM"
_STEP = 0.3  # of the length scale
_MAX_ITER = 60  # a start need not be converged
_SPARE = 1e-3  # share of the variance left as noise at least


def translated_start(
    likelihood: Likelihood,
    recording: Recording,
    standardization: dict[tuple[str, str], Standardization],
    *,
    edges: str,
    seed: int,
) -> Start:
    """The translated R-MSRM fit of a recording; a refused start where R-MSRM cannot be fitted.

    Raises
    ------
    KeyboardInterrupt
        If the R-MSRM fit was interrupted.
    """
    specification = likelihood.specification
    used = {pair.modality for pair in likelihood.nodes.pairs}
    estimator = RMSRM(
        specification.n_factors,
        latent_step=_STEP * starting_length_scale(specification),
        responses={m: _without_priors(r) for m, r in specification.responses.items() if m in used},
        edges=edges,
        max_iter=_MAX_ITER,
        seed=seed,
        progress=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        try:
            estimator.fit(recording)
        except ValueError as error:
            return Start(_NAME, {}, f"R-MSRM cannot be fitted: {error}")
    if estimator.stop_reason_ == INTERRUPTED:
        raise KeyboardInterrupt
    fit = estimator.model_
    paths = np.concatenate([run.paths[:, 0] for run in fit.runs.values()])
    latent_sd = np.sqrt(np.mean(paths**2, axis=0))
    parameters = parameters_at_rest(likelihood)
    bounds = likelihood.layout.bounds
    for pair in likelihood.nodes.pairs:
        name = f"{pair.participant}/{pair.modality}"
        own = fit.pairs[pair.key]
        scaling = standardization.get(pair.key)
        scale = np.ones(pair.n_features) if scaling is None else scaling.scale
        loading = np.nan_to_num(own.loading * (own.sd / scale)[:, None]) * latent_sd
        parameters[f"loading/{name}"] = loading if pair.reduced is None else pair.reduced.to_reduced(loading)
        left = max(own.residual_variance, _SPARE) * float(np.nanmean((own.sd / scale) ** 2))
        parameters[f"noise/{name}"] = np.asarray(left)
        for parameter in specification.responses[pair.modality].free:
            key = f"response/{pair.modality}/{parameter}"
            value = own.response.start[parameter]
            parameters[key] = np.asarray(np.clip(value, *bounds[key]))
    return Start(_NAME, parameters)


def _without_priors(response: Response) -> Response:
    """R-MSRM's objective is per entry: a prior on its scale would outweigh the data."""
    plain: dict[str, Any] = {name: Free(free.start, free.bounds) for name, free in response.free.items()}
    return replace(response, **plain)
