"""Which algebra integrates the latents out: a name becomes a backend here, once (DESIGN 4).

``"dense"`` is exact and costs the cube of nodes x factors; ``"statespace"`` is linear in the recording's length and
resolves its grid to a tolerance. ``"auto"`` takes the cheaper by the operations each needs and says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from msrm.gp.dense import Dense
from msrm.gp.statespace import StateSpace
from msrm.latent_grid import Matern
from msrm.nodes import Backend, NodeGroup

LIKELIHOODS = ("auto", "dense", "statespace")
STEP_SHARE = 0.3  # of the length scale: the spacing from which grids are refined
# Seconds per operation of a warm value and gradient on one core, measured (benchmarks): the dense cube runs in large
# blocks, the band in blocks of its width; below the fixed times neither counts.
_DENSE_SECONDS, _DENSE_FIXED = 1.2e-10, 2e-3
_BAND_SECONDS, _BAND_FIXED = 4e-10, 1.5e-2
_REFINED = 0.5  # of the first spacing: where grids usually end


@dataclass(frozen=True)
class Choice:
    """A backend and why it was taken."""

    backend: Backend
    name: str
    reason: str


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
    named: dict[str, Backend] = {"dense": exact, "statespace": grid}
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


def dense_seconds(groups: Mapping[str, Mapping[str, NodeGroup]], n_factors: int) -> float:
    """Estimated time of a dense value and gradient on one core."""
    orders = [n_factors * sum(group.n_nodes for group in run.values()) for run in groups.values()]
    return sum(_DENSE_FIXED + _DENSE_SECONDS * float(order) ** 3 for order in orders)


def band_seconds(backend: StateSpace) -> float:
    """Estimated time of a state-space value and gradient on one core, at the spacing where grids usually end."""
    total = 0.0
    for run, groups in backend.groups.items():
        supports = [group.response.support() for group in groups.values()]
        step = _REFINED * backend.step
        cells = max(high - low for low, high in supports) / step + 2.0
        order = backend.n_factors * backend.matern.dimension
        points = backend.grids[run].count / _REFINED
        total += _BAND_FIXED + _BAND_SECONDS * points * order * (order * (cells + 1.0)) ** 2
    return total
