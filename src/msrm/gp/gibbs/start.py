"""Where chains start: the MAP in rotated coordinates, its loadings and latents put back on the prior's scale.

With many features the MAP shrinks loadings and inflates latents (DESIGN 5); a chain would spend its warm-up undoing
that. Loadings are multiplied by the square root of the latents' mean power there, which hardly moves the likelihood.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from msrm.gp.data import NodeLayout, PairData
from msrm.gp.gibbs.marginal import prior_blocks
from msrm.gp.gibbs.state import State
from msrm.gp.gibbs.sweep import Sweeper
from msrm.gp.parameters import Specification
from msrm.responses import Identity

__all__ = ["balanced", "state_of", "within_bounds"]

Array = NDArray[np.float64]
_MARGIN = 1e-6  # of a prior's interquartile range


def state_of(specification: Specification, layout: NodeLayout, parameters: Mapping[str, Array]) -> State:
    """The state of parameters in raw features, their part outside the rotated coordinates as null rows.

    Parameters
    ----------
    specification : Specification
    layout : NodeLayout
        With the data at hand.
    parameters : {name: array}
        As in DESIGN 9; NaN for features that took no part.
    """
    rows = {pair.key: _rows(specification, pair, parameters) for pair in layout.pairs}
    noise = {pair.key: float(parameters[f"noise/{pair.participant}/{pair.modality}"]) for pair in layout.pairs}
    modalities = dict.fromkeys(pair.modality for pair in layout.pairs)
    values = specification.response_values(parameters)
    return State(
        rows,
        noise,
        {modality: dict(values.get(modality, {})) for modality in modalities},
        specification.length_scale_of(parameters),
        {modality: specification.timescale_of(parameters, modality) for modality in modalities},
    )


def within_bounds(specification: Specification, state: State) -> State:
    """The state with free scalars strictly inside their bounds: a MAP may lie on one, where a chain would stay."""
    for block in prior_blocks(specification, tuple(state.responses)):
        for name, prior in zip(block.names, block.priors, strict=True):
            margin = _MARGIN * float(np.diff(prior.quantile(np.array([0.25, 0.75])))[0])
            inside = float(np.clip(state.parameter(name), prior.lower + margin, prior.upper - margin))
            state = state.with_parameter(name, inside)
    return state


def _rows(specification: Specification, pair: PairData, parameters: Mapping[str, Array]) -> Array:
    columns = [parameters[f"loading/{pair.participant}/{pair.modality}"]]
    columns.append(parameters[f"offset/{pair.participant}/{pair.modality}"][:, None])
    if pair.modality in specification.run_offsets:
        names = [f"run_offset/{pair.participant}/{run}/{pair.modality}" for run in pair.rows]
        columns += [parameters[name][:, None] for name in names]
    raw = np.nan_to_num(np.concatenate(columns, axis=1))
    if pair.reduced is None:
        return raw
    inside = pair.reduced.to_reduced(raw)
    with_null, k = np.flatnonzero(pair.null_counts), raw.shape[1]
    if not len(with_null):
        return inside
    outside = raw - np.nan_to_num(pair.reduced.to_features(inside))
    stands = []
    for pattern in with_null:
        group = next(g for g in pair.reduced.groups if g.n_null and (g.rows == pair.patterns[pattern]).all())
        stands.append(_root(outside[group.features].T @ outside[group.features]).T)
    return np.concatenate([inside, *stands]).reshape(-1, k)


def _root(gram: Array) -> Array:
    """A square root F, ``F F' = gram``, of a positive semidefinite matrix."""
    values, vectors = np.linalg.eigh(gram)
    return vectors * np.sqrt(np.maximum(values, 0.0))


def balanced(sweeper: Sweeper, state: State) -> State:
    """The state with loadings that go with latents of mean power 1, as they are a priori."""
    current, size = sweeper.start(state), sweeper.specification.n_factors
    power, points = np.zeros((size, size)), 0
    for posterior in current.posteriors.values():
        if not posterior.factor.ok:
            return state
        seen = posterior.functionals(Identity(), None, posterior.grid.times)
        mean = posterior.mean_of(seen)
        power += mean.T @ mean + posterior.covariance_of(seen).sum(axis=0)
        points += len(mean)
    values, vectors = np.linalg.eigh(power / points)
    scale = (vectors * np.sqrt(values)) @ vectors.T
    turned = {key: np.hstack([rows[:, :size] @ scale, rows[:, size:]]) for key, rows in state.rows.items()}
    return replace(state, rows=turned)
