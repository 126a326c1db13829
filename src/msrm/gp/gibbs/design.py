"""What the Gibbs sampler keeps of the data: whitened entries of each pair, the nodes they meet, and sums over them.

An *entry* is an observed row of a participant-modality (under OU residuals a row differenced with the one before,
:mod:`msrm.gp.terms`); its design is ``x = [g o]``, the node functional and the offset columns. A coordinate's *row* is
``[w b c...]``: loading, offset and, where the model has them, run offsets; k numbers. Coordinates that miss the same
entries share a *pattern*.

Null rows (DESIGN 3.2) are held by a factor of their Gram matrix, ``F F'``: its k columns stand for them as k more
coordinates whose data are zero. Sums over rows are then right without further mention, moves turn F with the other
rows, and only numbers of scalars and of rows count the null rows themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from msrm.gp.data import Key, NodeLayout, PairData
from msrm.gp.parameters import Specification
from msrm.nodes import GroupStatistics

__all__ = ["Design", "PairDesign"]

Array = NDArray[np.float64]
_LOG_TWO_PI = float(np.log(2.0 * np.pi))


@dataclass(frozen=True, eq=False)
class PairDesign:
    """The entries of one participant-modality.

    Attributes
    ----------
    pair : PairData
    values : (entry, coordinate)
        Whitened data, 0 where missing and for the coordinates that stand for null rows.
    offsets : (entry, q)
        Columns of the offset and the run offsets.
    nodes : {run: (entry index, node)}
    present : (pattern, entry)
        1 where a pattern has the entry.
    pattern : (coordinate,) int
    null : {pattern: slice}
        Coordinates that stand for a pattern's null rows.
    log_variance : (entry,)
        Of the whitening; 0 for white residuals.
    power : float
    """

    pair: PairData
    values: Array
    offsets: Array
    nodes: dict[str, tuple[NDArray[np.intp], NDArray[np.intp]]]
    present: Array
    pattern: NDArray[np.intp]
    null: dict[int, slice]
    log_variance: Array
    power: float

    @cached_property
    def complete(self) -> bool:
        """Whether every pattern has every entry."""
        return bool(self.present.all())

    @cached_property
    def members(self) -> Array:
        """Coordinates with data and null rows by pattern, (pattern,)."""
        own = self.pattern[: self.pair.n_coordinates]
        return np.bincount(own, minlength=len(self.present)) + self.pair.null_counts

    @cached_property
    def scalars(self) -> dict[str, float]:
        """Observed scalars by run, null features included."""
        by_entry = self.members @ self.present
        return {run: float(by_entry[entry].sum()) for run, (entry, _) in self.nodes.items()}

    @cached_property
    def log_spread(self) -> dict[str, float]:
        """Sums of the whitening's log variance over the observed scalars, by run."""
        by_entry = self.log_variance * (self.members @ self.present)
        return {run: float(by_entry[entry].sum()) for run, (entry, _) in self.nodes.items()}

    def matrix(self, functionals: Mapping[str, Array]) -> Array:
        """x of every entry, (entry, k), from functionals (node, K) by run."""
        size = next(iter(functionals.values())).shape[1]
        out = np.empty((len(self.values), size + self.offsets.shape[1]))
        out[:, size:] = self.offsets
        for run, (entry, node) in self.nodes.items():
            out[entry, :size] = functionals[run][node]
        return out

    def grams(self, matrix: Array) -> Array:
        """Sums of x x' over the entries of each pattern, (pattern, k, k)."""
        k = matrix.shape[1]
        if self.complete:
            return np.broadcast_to(matrix.T @ matrix, (len(self.present), k, k))
        outer = (matrix[:, :, None] * matrix[:, None, :]).reshape(-1, k * k)
        return (self.present @ outer).reshape(-1, k, k)

    def row_grams(self, rows: Array) -> Array:
        """Sums of row row' over the coordinates of each pattern, (pattern, k, k)."""
        if len(self.present) == 1:
            return (rows.T @ rows)[None]
        out = np.zeros((len(self.present), rows.shape[1], rows.shape[1]))
        np.add.at(out, self.pattern, rows[:, :, None] * rows[:, None, :])
        return out

    def squares(self, matrix: Array, rows: Array) -> dict[str, float]:
        """Sums of squared residuals ``y - x . row`` over coordinates and entries, by run."""
        residual = self.values - matrix @ rows.T
        if not self.complete:
            residual *= self.present[self.pattern].T
        by_entry = np.einsum("er,er->e", residual, residual)
        return {run: float(by_entry[entry].sum()) for run, (entry, _) in self.nodes.items()}

    def information(self, rows: Array, row_grams: Array) -> Array:
        """Sums of ``w (y - offsets)`` over coordinates, (entry, K)."""
        size = rows.shape[1] - self.offsets.shape[1]
        crossed = np.tensordot(self.present, row_grams[:, size:, :size], (0, 0))
        return self.values @ rows[:, :size] - np.einsum("eq,eqk->ek", self.offsets, crossed)


@dataclass(frozen=True, eq=False)
class Design:
    """All pairs at one setting of the residual timescales.

    Attributes
    ----------
    specification : Specification
    layout : NodeLayout
    timescales : {modality: float}
        Seconds; NaN for white residuals.
    pairs : {(participant, modality): PairDesign}
    """

    specification: Specification
    layout: NodeLayout
    timescales: dict[str, float]
    pairs: dict[Key, PairDesign]

    @classmethod
    def of(cls, specification: Specification, layout: NodeLayout, timescales: Mapping[str, float]) -> "Design":
        """The design at residual timescales {modality: seconds}."""
        known = dict(timescales)
        pairs = {pair.key: _pair_design(specification, layout, pair, known[pair.modality]) for pair in layout.pairs}
        return cls(specification, layout, known, pairs)

    def at(self, modality: str, timescale: float) -> "Design":
        """The design with another residual timescale of one modality."""
        pairs = {
            key: _pair_design(self.specification, self.layout, old.pair, timescale) if key[1] == modality else old
            for key, old in self.pairs.items()
        }
        return Design(self.specification, self.layout, self.timescales | {modality: timescale}, pairs)

    @cached_property
    def modalities(self) -> tuple[str, ...]:
        """Modalities with data."""
        return tuple(dict.fromkeys(modality for _, modality in self.pairs))

    @cached_property
    def feature_rows(self) -> dict[str, int]:
        """Rows of [w b c...] by modality, null rows included: what a scale of the loadings acts on."""
        return {name: int(sum(pair.members.sum() for pair in self.members(name))) for name in self.modalities}

    def members(self, modality: str) -> list[PairDesign]:
        """The pairs of one modality."""
        return [pair for key, pair in self.pairs.items() if key[1] == modality]

    @cached_property
    def coefficients(self) -> dict[tuple[str, str], Array | None]:
        """Weights (node, 2) of differenced nodes by run and modality; None for white residuals."""
        return {
            (run, modality): self.specification.residual(modality).coefficients(gaps, self.timescales[modality])
            for (run, modality), gaps in self.layout.gaps.items()
        }

    def node_offsets(self, run: str, modality: str) -> Array:
        """What a constant 1 becomes at each node of a run and modality, (node,)."""
        coefficients = self.coefficients[run, modality]
        if coefficients is None:
            return np.ones(self.layout.groups[run][modality].n_nodes)
        return coefficients.sum(axis=1)

    def statistics(
        self, modality: str, rows: Mapping[Key, Array], noise: Mapping[Key, float]
    ) -> dict[str, GroupStatistics]:
        """D and h of the nodes of one modality, by run (DESIGN 3.1).

        Parameters
        ----------
        modality : str
        rows : {key: (coordinate, k)}
        noise : {key: float}
        """
        size, sums = self.specification.n_factors, {}
        for pair in self.members(modality):
            key, weight = pair.pair.key, pair.power / noise[pair.pair.key]
            grams = pair.row_grams(rows[key])
            sums[key] = grams[:, :size, :size] * weight, pair.information(rows[key], grams) * weight
        out = {}
        for run, groups in self.layout.groups.items():
            if modality not in groups:
                continue
            classes = self.layout.classes[run, modality]
            precision = np.zeros((len(classes.presence), size, size))
            information = np.zeros((groups[modality].n_nodes, size))
            for participant, columns in classes.columns.items():
                grams, entries = sums[participant, modality]
                precision += np.tensordot(classes.presence[:, columns], grams, 1)
                entry, node = self.pairs[participant, modality].nodes[run]
                # A pair meets a node once, so that adding by index is safe.
                information[node] += entries[entry]
            out[run] = GroupStatistics(precision, classes.index, information, self.coefficients[run, modality])
        return out

    def constant(self, rows: Mapping[Key, Array], noise: Mapping[Key, float], modality: str | None = None) -> float:
        """``-c / 2`` of DESIGN 3.1: the log likelihood without the latents, of one modality or all."""
        total = 0.0
        for key, pair in self.pairs.items():
            if modality in (None, key[1]):
                bare = np.zeros((len(pair.values), rows[key].shape[1]))
                bare[:, -pair.offsets.shape[1] :] = pair.offsets
                total += sum(self.conditional(key, bare, rows[key], noise[key]).values())
        return total

    def conditional(self, key: Key, matrix: Array, rows: Array, noise: float) -> dict[str, float]:
        """Log likelihood of a pair given its design matrix, by run, raised to the modality's power."""
        pair = self.pairs[key]
        return {
            run: -0.5
            * pair.power
            * (squares / noise + pair.scalars[run] * (_LOG_TWO_PI + np.log(noise)) + pair.log_spread[run])
            for run, squares in pair.squares(matrix, rows).items()
        }


def _pair_design(specification: Specification, layout: NodeLayout, pair: PairData, timescale: float) -> PairDesign:
    """Whiten a pair: ``(y_n - phi y_p) / s``, offsets alike (DESIGN 2, residuals)."""
    rows = layout.rows[pair.key]
    residual = specification.residual(pair.modality)
    values = np.concatenate([block for _, block in pair], axis=1)
    offsets = np.ones((len(pair.times), 1))
    if pair.modality in specification.run_offsets:
        inside = np.zeros((len(pair.times), len(pair.rows)))
        for place, span in enumerate(pair.rows.values()):
            inside[span, place] = 1.0
        offsets = np.hstack([offsets, inside])
    gaps = pair.times[rows.current] - pair.times[rows.previous]
    coefficients = residual.coefficients(gaps, timescale)
    if coefficients is not None:
        now, before = coefficients.T[:, :, None]
        values = now * values[rows.current] + before * values[rows.previous]
        offsets = now * offsets[rows.current] + before * offsets[rows.previous]
    elif not rows.plain:
        values, offsets = values[rows.current], offsets[rows.current]
    present = rows.present.astype(float)
    if not rows.complete:
        values = values * present[pair.pattern].T
    k = specification.n_factors + offsets.shape[1]
    with_null = np.flatnonzero(pair.null_counts)
    starts = values.shape[1] + k * np.arange(len(with_null))
    return PairDesign(
        pair,
        np.hstack([values, np.zeros((len(values), k * len(with_null)))]),
        offsets,
        rows.runs,
        present,
        np.concatenate([pair.pattern, np.repeat(with_null, k)]),
        {int(which): slice(int(start), int(start) + k) for which, start in zip(with_null, starts, strict=True)},
        residual.log_variance(gaps, timescale),
        specification.power(pair.modality),
    )
