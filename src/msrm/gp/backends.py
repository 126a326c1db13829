"""Which algebra integrates the latents out: a name becomes a backend here, once (DESIGN 4).

``"dense"`` is exact and costs the cube of nodes x factors; ``"statespace"`` is linear in the recording's length and
resolves its grid to a tolerance. ``"auto"`` takes the cheaper by the operations each needs and says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from msrm.banded import BandCholesky
from msrm.gp.cholesky import Factor
from msrm.gp.dense import Dense
from msrm.gp.statespace import StateSpace
from msrm.latent_grid import Matern
from msrm.nodes import Backend, GroupStatistics, NodeGroup
from msrm.responses import Response

LIKELIHOODS = ("auto", "dense", "statespace")
STEP_SHARE = 0.3  # of the length scale: the spacing from which grids are refined
# Seconds of a warm value and gradient of one run on one core, fitted to recordings of 40 to 450 s, on an idle core:
# fixed, per square and cube of the dense order; fixed, per entry of the band and per operation of its factorization.
_DENSE = 1.5e-2, 5e-8, 5e-11
_BAND = 1.6e-2, 3e-9, 2.2e-11
_REFINED = 0.5  # of the first spacing: a plain grid there takes as long as those with moments where a search ends


class LatentPosterior(Protocol):
    """The latent of one run given data, seen through any response at any time."""

    @property
    def factor(self) -> Factor | BandCholesky:
        """Of the posterior; ``factor.ok`` says whether there is one."""
        ...

    def functionals(self, response: Response, values: Mapping[str, float] | None, times: np.ndarray) -> Any:
        """The factors seen through a response at times (functional,) in seconds."""
        ...

    def mean_of(self, made: Any) -> np.ndarray:
        """E[g], (functional, K)."""
        ...

    def covariance_of(self, made: Any) -> np.ndarray:
        """Cov(g) of each functional, (functional, K, K)."""
        ...

    def joint_covariance(self, made: Sequence[Any]) -> np.ndarray:
        """Cov of all functionals, (functional, K, functional, K)."""
        ...


class LatentBackend(Backend, Protocol):
    """A likelihood backend that also gives the latent's posterior."""

    def posterior(
        self,
        run: str,
        response_values: Mapping[str, Mapping[str, float]],
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
    ) -> LatentPosterior:
        """The latent of one run given its data."""
        ...


@dataclass(frozen=True)
class Choice:
    """A backend and why it was taken, and where it runs and why."""

    backend: LatentBackend
    name: str
    reason: str
    device: str = "cpu"
    device_reason: str = "device='cpu' was asked for"


def select_likelihood(
    name: str,
    groups: Mapping[str, Mapping[str, NodeGroup]],
    n_factors: int,
    *,
    matern: Matern,
    length_scale: float,
    length_scale_slope: bool = True,
) -> Choice:
    """The likelihood backend of a name.

    Parameters
    ----------
    name : {"auto", "dense", "statespace"}
    groups : {run: {modality: NodeGroup}}
    n_factors : int
    matern : Matern
    length_scale : float
        Seconds, for the first grid spacing.
    length_scale_slope : bool
        Whether the length scale is learned.

    Returns
    -------
    Choice

    Raises
    ------
    ValueError
        For an unknown name.
    """
    if name not in LIKELIHOODS:
        raise ValueError(f"likelihood must be one of {', '.join(LIKELIHOODS)}, found {name!r}.")
    grid = StateSpace.on(
        groups, n_factors, STEP_SHARE * length_scale, matern=matern, length_scale_slope=length_scale_slope
    )
    exact = Dense(groups, n_factors, matern, length_scale_slope)
    named: dict[str, LatentBackend] = {"dense": exact, "statespace": grid}
    if name in named:
        return Choice(named[name], name, f"likelihood={name!r} was asked for")
    dense, band = dense_seconds(groups, n_factors), band_seconds(grid)
    largest = max(sum(group.n_nodes for group in run.values()) for run in groups.values()) * n_factors
    told = (
        f"a gradient is estimated to take {1e3 * dense:.0f} ms dense (order {largest}), {1e3 * band:.0f} ms statespace"
    )
    if dense <= band:
        return Choice(exact, "dense", told)
    return Choice(grid, "statespace", told)


def grid_facts(backend: Backend) -> dict[str, Any]:
    """A backend's grid, plain: ``step`` (NaN without one) and ``residual``, ``coarse_step`` and ``moments`` if any."""
    coarse_step, moments = float(getattr(backend, "coarse_step", np.nan)), int(getattr(backend, "moments", 0))
    return {
        "step": float(getattr(backend, "step", np.nan)),
        "residual": sorted(getattr(backend, "residual", ())),
        **({"coarse_step": coarse_step} if np.isfinite(coarse_step) else {}),
        **({"moments": moments} if moments else {}),
    }


def dense_seconds(groups: Mapping[str, Mapping[str, NodeGroup]], n_factors: int) -> float:
    """Estimated time of a dense value and gradient on one core."""
    orders = [float(n_factors * sum(group.n_nodes for group in run.values())) for run in groups.values()]
    fixed, square, cube = _DENSE
    return sum(fixed + square * order**2 + cube * order**3 for order in orders)


def band_seconds(backend: StateSpace) -> float:
    """Estimated time of a state-space value and gradient on one core, on a grid of the cost that searches end at."""
    total, (fixed, entry, operation) = 0.0, _BAND
    for run, groups in backend.groups.items():
        supports = [group.response.support() for group in groups.values()]
        cells = max(high - low for low, high in supports) / (_REFINED * backend.step) + 2.0
        block = backend.n_factors * backend.matern.dimension
        width, order = block * (cells + 1.0), block * backend.grids[run].count / _REFINED
        total += fixed + entry * order * width + operation * order * width**2
    return total
