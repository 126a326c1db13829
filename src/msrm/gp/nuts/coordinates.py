"""Every parameter of a chain as one point x of the whole space, and the prior density there with its Jacobian.

Owns the map from x to the likelihood's parameters in rotated coordinates: rows [w b c...] as they are, the diagonals
of the pivots (:mod:`msrm.gp.nuts.gauge`) and of null factors (:mod:`msrm.gp.nuts.standins`) as logarithms, structural
zeros left out, scalars by :mod:`msrm.gp.nuts.transforms`. With ``value = s exp(x)`` and ``value / s ~ chi(n)``,

    log p(x) = n x - exp(2 x) / 2 + (1 - n/2) log 2 - log Gamma(n/2).
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from scipy.special import gammaln

from msrm.gp.data import Key, NodeLayout
from msrm.gp.gibbs.state import State
from msrm.gp.jax_settings import FLOAT
from msrm.gp.nuts.gauge import Pivots, pivot_rows, turn_to_pivots
from msrm.gp.nuts.standins import NullBlock, null_blocks, stored_rows, with_standins
from msrm.gp.nuts.transforms import Scalars
from msrm.gp.parameters import Layout, Parameters, Specification

__all__ = ["Coordinates"]

_LEAST = 1e-8  # of a diagonal, in prior sds: a start at zero has no logarithm


@dataclass(frozen=True, eq=False)
class Coordinates:
    """The coordinates of a model on some data.

    Attributes
    ----------
    specification : Specification
    nodes : NodeLayout
        With stand-ins: what the likelihood is made of.
    layout : Layout
        Of the likelihood's parameters.
    blocks : {(participant, modality): tuple of NullBlock}
    pivots : tuple of ((participant, modality), coordinate)
    where : (coordinate,) int
        Place of each x in the packed parameters.
    sd : (coordinate,)
        Prior sd of rows; 1 for scalars.
    degrees : (coordinate,)
        Of the chi prior of a diagonal; 0 elsewhere.
    places : {name: int}
        Of the scalars among the coordinates.
    scalars : Scalars
    """

    specification: Specification
    nodes: NodeLayout
    layout: Layout
    blocks: dict[Key, tuple[NullBlock, ...]]
    pivots: Pivots
    where: NDArray[np.intp]
    sd: NDArray[np.float64]
    degrees: NDArray[np.float64]
    places: dict[str, int]
    scalars: Scalars

    @classmethod
    def of(cls, specification: Specification, layout: NodeLayout, state: State) -> "Coordinates":
        """The coordinates whose pivots suit a state.

        Parameters
        ----------
        specification : Specification
        layout : NodeLayout
            In rotated features.
        state : State

        Raises
        ------
        ValueError
            When there are fewer loading rows than factors.
        TypeError
            For a prior that has no traced density.
        """
        size = specification.n_factors
        own = {pair.key: state.rows[pair.key][: pair.n_coordinates, :size] for pair in layout.pairs}
        pivots = pivot_rows(own, state.noise)
        widths = {pair.key: state.rows[pair.key].shape[1] for pair in layout.pairs}
        blocks = {pair.key: null_blocks(pair, widths[pair.key]) for pair in layout.pairs}
        nodes = with_standins(layout, widths)
        made = Layout.of(specification, nodes.pairs)
        scalars = Scalars.of(list(made.scalar_priors.values()))
        kinds = _Kinds(specification, made)
        for place, (key, row) in enumerate(pivots):
            kinds.pivot(key, row, place)
        for pair in nodes.pairs:
            for block in blocks[pair.key]:
                kinds.factor(pair.key, tuple(pair.rows), block)
        where = np.flatnonzero(kinds.free)
        places = {name: int(np.searchsorted(where, made.slices[name].start)) for name in made.scalar_priors}
        sd, degrees = kinds.sd[where], kinds.degrees[where]
        return cls(specification, nodes, made, blocks, pivots, where, sd, degrees, places, scalars)

    @property
    def size(self) -> int:
        """Dimension of x."""
        return len(self.where)

    @property
    def scalar_places(self) -> NDArray[np.intp]:
        """Places of the scalars, in their order."""
        return np.array(list(self.places.values()), dtype=np.intp)

    def packed(self, x: Array) -> Array:
        """The likelihood's packed parameters at x (traced)."""
        values = jnp.where(self.degrees > 0.0, self.sd * jnp.exp(jnp.where(self.degrees > 0.0, x, 0.0)), x)
        at = self.scalar_places
        values = values.at[at].set(self.scalars.value(x[at]))
        return jnp.zeros(self.layout.size, FLOAT).at[self.where].set(values)

    def log_prior(self, x: Array) -> Array:
        """Log prior density of x, Jacobians included (traced)."""
        rows, at = np.ones(self.size, bool), self.scalar_places
        rows[at] = False
        diagonal = self.degrees > 0.0
        plain, n = rows & ~diagonal, self.degrees[diagonal]
        constant = -float(np.sum(np.log(self.sd[plain])) + 0.5 * np.log(2.0 * np.pi) * plain.sum())
        constant += float(np.sum((1.0 - 0.5 * n) * np.log(2.0) - gammaln(0.5 * n)))
        logs = jnp.where(diagonal, x, 0.0)
        total = constant - 0.5 * jnp.sum(jnp.where(plain, x / self.sd, 0.0) ** 2)
        total = total + jnp.sum(jnp.where(diagonal, self.degrees * logs - 0.5 * jnp.exp(2.0 * logs), 0.0))
        of_scalars = self.scalars.log_density(self.scalars.value(x[at])) + self.scalars.log_slope(x[at])
        return total + jnp.sum(of_scalars)

    def turn(self, state: State) -> NDArray[np.float64]:
        """The rotation (K, K) of a state's loadings that makes the pivots triangular."""
        size = self.specification.n_factors
        return turn_to_pivots({key: rows[:, :size] for key, rows in state.rows.items()}, self.pivots)

    def point(self, state: State) -> NDArray[np.float64]:
        """x of a state, its factors turned to the pivots."""
        size, turn = self.specification.n_factors, self.turn(state)
        parameters: dict[str, Any] = {}
        for pair in self.nodes.pairs:
            own = state.rows[pair.key]
            rows = np.hstack([own[:, :size] @ turn, own[:, size:]])
            parameters |= self._named(pair.key, tuple(pair.rows), self._triangular(pair.key, rows))
            parameters[f"noise/{pair.participant}/{pair.modality}"] = np.array(state.noise[pair.key])
        for name in self.layout.scalar_priors:
            if not name.startswith("noise/"):
                parameters[name] = np.array(state.parameter(name))
        x = self.layout.packed(parameters)[self.where]
        diagonal = self.degrees > 0.0
        x[diagonal] = np.log(np.maximum(x[diagonal] / self.sd[diagonal], _LEAST))
        at = self.scalar_places
        x[at] = self.scalars.coordinate(x[at])
        return x

    def state(self, packed: NDArray[np.float64], start: State) -> State:
        """The state of packed parameters; `start` gives what is fixed."""
        parameters = self.layout.unpacked(np.array(packed))
        rows, noise = {}, {}
        for pair in self.nodes.pairs:
            names = self._names(pair.key, tuple(pair.rows))
            columns = [parameters[names[0]], *(parameters[name][:, None] for name in names[1:])]
            rows[pair.key] = stored_rows(np.hstack(columns), self.blocks[pair.key])
            noise[pair.key] = float(parameters[f"noise/{pair.participant}/{pair.modality}"])
        out = replace(start, rows=rows, noise=noise)
        for name in self.layout.scalar_priors:
            if not name.startswith("noise/"):
                out = out.with_parameter(name, float(parameters[name]))
        return out

    def row_places(self, key: Key, runs: tuple[str, ...]) -> NDArray[np.intp]:
        """Places (coordinate, k) in the packed parameters of a pair's rows."""
        return _row_places(self.layout, self._names(key, runs))

    def _names(self, key: Key, runs: tuple[str, ...]) -> list[str]:
        return _row_names(self.specification, key, runs)

    def _named(self, key: Key, runs: tuple[str, ...], rows: NDArray[np.float64]) -> Parameters:
        names, size = self._names(key, runs), self.specification.n_factors
        columns = dict(zip(names[1:], rows[:, size:].T, strict=True))
        return {names[0]: rows[:, :size], **columns}

    def _triangular(self, key: Key, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rows with the stand-ins of the likelihood's layout, from those that chains store."""
        blocks = self.blocks[key]
        if not blocks:
            return rows
        parts, start = [rows[: blocks[0].start]], blocks[0].start
        for block in blocks:
            own, start = rows[start : start + block.k], start + block.k
            # Only the Gram matrix counts; a rotation of the factors has undone the triangle.
            upper = np.linalg.qr(own, mode="r")
            upper = upper * np.where(np.diag(upper) < 0.0, -1.0, 1.0)[:, None]
            parts.append(upper[: block.width])
        return np.concatenate(parts)


def _row_names(specification: Specification, key: Key, runs: tuple[str, ...]) -> list[str]:
    names = [f"loading/{key[0]}/{key[1]}", f"offset/{key[0]}/{key[1]}"]
    if key[1] in specification.run_offsets:
        names += [f"run_offset/{key[0]}/{run}/{key[1]}" for run in runs]
    return names


def _row_places(layout: Layout, names: list[str]) -> NDArray[np.intp]:
    loading = layout.slices[names[0]]
    shape = layout.shapes[names[0]]
    columns = [np.arange(loading.start, loading.stop).reshape(shape)]
    columns += [np.arange(layout.slices[name].start, layout.slices[name].stop)[:, None] for name in names[1:]]
    return np.hstack(columns)


class _Kinds:
    """What each packed parameter is: free or a structural zero, its prior sd, the degrees of a chi diagonal."""

    def __init__(self, specification: Specification, layout: Layout) -> None:
        self.specification, self.layout = specification, layout
        self.free = np.ones(layout.size, bool)
        self.degrees = np.zeros(layout.size)
        self.sd = np.ones(layout.size)
        for name, span in layout.slices.items():
            sd = layout.normal_sd(name)
            if sd is not None:
                self.sd[span] = sd

    def pivot(self, key: Key, row: int, place: int) -> None:
        """Row `place` of the lower triangle L."""
        size = self.specification.n_factors
        where = _row_places(self.layout, _row_names(self.specification, key, ()))[row, :size]
        self.degrees[where[place]] = size - place
        self.free[where[place + 1 :]] = False

    def factor(self, key: Key, runs: tuple[str, ...], block: NullBlock) -> None:
        """Stand-ins of a null block: row j holds column j of the lower triangular F."""
        if not block.factored:
            return
        where = _row_places(self.layout, _row_names(self.specification, key, runs))[block.span]
        self.degrees[np.diag(where)] = block.count - np.arange(block.k)
        self.free[where[np.tril_indices(block.k, -1)]] = False
