"""Posterior of a run's latent functionals at fixed parameters, through either backend (DESIGN 3, 5).

Without data the posterior is the prior: the same algebra with one node that says nothing.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from msrm.gp.backends import LatentPosterior
from msrm.gp.fitted import FittedGP
from msrm.nodes import GroupStatistics, NodeGroup
from msrm.responses import Identity, Response

_NOTHING = "nothing"


def latent_posterior(
    fitted: FittedGP,
    run: str,
    groups: Mapping[str, NodeGroup],
    statistics: Mapping[str, GroupStatistics],
    queries: Sequence[tuple[Response, np.ndarray]],
) -> LatentPosterior:
    """The posterior of one run.

    Parameters
    ----------
    fitted : FittedGP
    run : str
    groups, statistics : {modality: ...}
        Of the run's observations; may be empty, the answer is then the prior.
    queries : sequence of (response, times)
        What will be asked of it: the latent is made to reach over their supports.

    Raises
    ------
    FloatingPointError
        When the factorization fails; the message is its diagnostic.
    """
    reach = _reach(queries)
    if not groups:
        size = fitted.specification.n_factors
        groups = {_NOTHING: NodeGroup(_NOTHING, np.array([reach[0]]), Identity())}
        silence = GroupStatistics(np.zeros((1, size, size)), np.zeros(1, np.intp), np.zeros((1, size)))
        statistics = {_NOTHING: silence}
    backend = fitted.backend_for({run: groups}, {run: reach})
    made = backend.posterior(run, {}, fitted.length_scale, statistics)
    if not made.factor.ok:
        raise FloatingPointError(f"{run}: {made.factor.diagnostic}")
    return made


def _reach(queries: Sequence[tuple[Response, np.ndarray]]) -> tuple[float, float]:
    """First and last second of latent time that the queries see."""
    supports = [(times, response.support()) for response, times in queries]
    return min(float(t.min() - high) for t, (_, high) in supports), max(
        float(t.max() - low) for t, (low, _) in supports
    )
