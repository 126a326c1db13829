"""Posterior moments of latent functionals at any times, at fixed parameters, through any backend.

A query is a node group without observations (D = 0, h = 0): the backend's E[g] and E[g g'] of its nodes are the answer,
so that no backend needs a second method.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from msrm.gp.fitted import FittedGP
from msrm.nodes import GroupStatistics, NodeGroup
from msrm.responses import Response

_QUERY = "query\x00"  # no modality has a NUL in its name


@dataclass(frozen=True, eq=False)
class Query:
    """Functionals to be inferred: a response with fixed parameters at times (time,) in seconds, increasing."""

    response: Response
    times: np.ndarray


@dataclass(frozen=True, eq=False)
class Moments:
    """Posterior of the functionals of a query.

    Attributes
    ----------
    mean : (time, K)
    covariance : (time, K, K)
        Over factors, at each time.
    """

    mean: np.ndarray
    covariance: np.ndarray


def functional_moments(
    fitted: FittedGP,
    run: str,
    groups: Mapping[str, NodeGroup],
    statistics: Mapping[str, GroupStatistics],
    queries: Mapping[str, Query],
) -> dict[str, Moments]:
    """Posterior moments of queried functionals of one run.

    Parameters
    ----------
    fitted : FittedGP
    run : str
    groups, statistics : {modality: ...}
        Of the run's observations; may be empty, the answer is then the prior.
    queries : {name: Query}

    Raises
    ------
    FloatingPointError
        When the factorization fails; the message is its diagnostic.
    """
    size = fitted.specification.n_factors
    asked = {_QUERY + name: NodeGroup(_QUERY + name, query.times, query.response) for name, query in queries.items()}
    everything = {**groups, **asked}
    nothing = {
        name: GroupStatistics(
            np.zeros((group.n_nodes, size, size)), np.arange(group.n_nodes), np.zeros((group.n_nodes, size))
        )
        for name, group in asked.items()
    }
    backend = fitted.backend_for({run: everything})
    found = backend.evidence(run, {}, fitted.length_scale, {**statistics, **nothing}, True)
    if not found.ok:
        raise FloatingPointError(f"{run}: {found.diagnostic}")
    out = {}
    for name in queries:
        mean = found.mean[_QUERY + name]
        out[name] = Moments(mean, found.second_moment[_QUERY + name] - mean[:, :, None] * mean[:, None, :])
    return out
