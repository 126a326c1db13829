"""Run offsets of runs that a fit has not seen, at held parameters: their mode (DESIGN 2).

Given everything else the data are normal, so that the log density is a quadratic of the offsets. Conjugate gradients
find its top from slopes alone, in as many steps as there are independent ways of the offsets to move the latents. The
preconditioner is the precision that offsets had were the latents known.
"""

import numpy as np
from scipy.sparse.linalg import LinearOperator, cg

from msrm.gp.likelihood import Likelihood
from msrm.gp.parameters import Parameters

_STEPS = 200
_SMALL = 1e-10  # of the slope at zero: what is left of it ends the search


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
    shapes = {n: s for n, s in likelihood.layout.shapes.items() if n.startswith("run_offset/") and n not in parameters}
    if not shapes:
        return dict(parameters)
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
    prior = likelihood.specification.priors.run_offset_sd**-2

    def named(x: np.ndarray) -> Parameters:
        parts = np.split(x, ends[:-1])
        return parameters | {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}

    def slope(x: np.ndarray, gradient: Parameters) -> np.ndarray:
        return np.concatenate([np.ravel(gradient[name]) for name in shapes]) - prior * x

    x = np.zeros(ends[-1])
    value, gradient, moments = likelihood.value_gradient_moments(named(x))
    if not np.isfinite(value):
        raise FloatingPointError(likelihood.diagnostic(named(x)))
    precision = []
    for name, shape in shapes.items():
        _, participant, run, modality = name.split("/")
        seen = moments[participant, modality]
        own = seen.scale * seen.run_rows[run] * seen.share + prior
        precision.append(np.broadcast_to(own, shape).ravel())
    diagonal, at_zero = np.concatenate(precision), slope(x, gradient)

    def curved(x: np.ndarray) -> np.ndarray:
        return at_zero - slope(x, likelihood.value_and_gradient(named(x))[1])

    shape = len(x), len(x)
    return named(
        cg(
            LinearOperator(shape, matvec=curved, dtype=float),
            at_zero,
            rtol=_SMALL,
            maxiter=_STEPS,
            M=LinearOperator(shape, matvec=lambda y: y / diagonal, dtype=float),
        )[0]
    )
