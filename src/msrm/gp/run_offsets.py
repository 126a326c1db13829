"""Run offsets of runs that a fit has not seen, at held parameters: EM on them alone, to their mode (DESIGN 2)."""

import numpy as np

from msrm.gp.likelihood import Likelihood
from msrm.gp.parameters import Parameters

_STEPS = 200
_SMALL = 1e-7  # of the prior sd: steps below it end the search


def with_run_offsets(likelihood: Likelihood, parameters: Parameters) -> Parameters:
    """Parameters with the run offsets that are missing set to their mode given the data and the rest.

    Parameters
    ----------
    likelihood : Likelihood
    parameters : Parameters
        All but some run offsets.

    Returns
    -------
    Parameters
    """
    layout = likelihood.layout
    free = [name for name in layout.shapes if name.startswith("run_offset/") and name not in parameters]
    out = parameters | {name: np.zeros(layout.shapes[name]) for name in free}
    sd = likelihood.specification.priors.run_offset_sd
    for _ in range(_STEPS if free else 0):
        value, gradient, moments = likelihood.value_gradient_moments(out)
        if not np.isfinite(value):
            raise FloatingPointError(likelihood.diagnostic(out))
        largest = 0.0
        for name in free:
            _, participant, run, modality = name.split("/")
            seen = moments[participant, modality]
            precision = seen.scale * seen.run_rows[run] * seen.share + 1.0 / sd**2
            step = (gradient[name] - out[name] / sd**2) / precision
            out[name] = out[name] + step
            largest = max(largest, float(np.abs(step).max(initial=0.0)))
        if largest < _SMALL * sd:
            break
    return out
