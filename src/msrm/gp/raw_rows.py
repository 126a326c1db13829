"""Draws of raw features from draws in rotated coordinates: what the chains do not store (DESIGN 3.2).

A coordinate's row [w b c...] turns back by V. Null rows have only their Gram matrix ``F F'`` drawn; given it they are
``Q F'`` with Q uniform among orthonormal columns outside the span of V, drawn here from a generator that the draw's own
number seeds: asking again, or for part of the features, gives the same rows.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from msrm.gp.data import PairData
from msrm.gp.stored_basis import StoredPair

__all__ = ["raw_rows"]

Array = NDArray[np.float64]
_TOGETHER_BYTES = 2**26  # of raw rows turned back in one pass over the data


def raw_rows(pair: PairData | StoredPair, rows: Array, seeds: Sequence[tuple[int, ...]]) -> Array:
    """Rows of raw features.

    Parameters
    ----------
    pair : PairData or StoredPair
        Rotated, with its data at hand or its basis stored.
    rows : (draw, coordinate, k)
        With the coordinates that stand for null rows at the end (:mod:`msrm.gp.gibbs.design`).
    seeds : one tuple of int for each draw

    Returns
    -------
    (draw, feature, k)
        NaN for features that took no part.
    """
    if pair.reduced is None:
        return rows
    n_draws, _, k = rows.shape
    together = max(1, _TOGETHER_BYTES // (8 * pair.n_features * k))
    out = np.empty((n_draws, pair.n_features, k))
    for start in range(0, n_draws, together):
        part = slice(start, start + together)
        out[part] = _turned_back(pair, rows[part], seeds[part])
    return out


def _turned_back(pair: PairData | StoredPair, rows: Array, seeds: Sequence[tuple[int, ...]]) -> Array:
    n_draws, _, k = rows.shape
    reduced, own = pair.reduced, pair.n_coordinates
    assert reduced is not None
    flat = np.moveaxis(rows[:, :own], 0, 1).reshape(own, n_draws * k)
    out = np.moveaxis(reduced.to_features(flat).reshape(-1, n_draws, k), 1, 0)
    with_null = np.flatnonzero(pair.null_counts)
    for group in (group for group in reduced.groups if group.n_null):
        # Chains number null blocks by pattern; a rotated group is the only one of its pattern with null rows.
        place = int(np.flatnonzero((pair.patterns[with_null] == group.rows).all(axis=1))[0])
        block = rows[:, own + place * k : own + (place + 1) * k]
        width = min(group.n_null, k)
        standard = np.zeros((pair.n_features, n_draws, width))
        for draw, seed in enumerate(seeds):
            rng = np.random.default_rng((*seed, place))
            standard[group.features, draw] = rng.standard_normal((len(group.features), width))
        flat = standard.reshape(pair.n_features, -1)
        inside = reduced.to_features(reduced.to_reduced(flat))
        flat -= np.where(np.isnan(inside), 0.0, inside)
        columns = np.moveaxis(flat.reshape(standard.shape), 1, 0)[:, group.features]
        grams = columns.swapaxes(1, 2) @ columns
        roots = np.linalg.cholesky(grams)
        # columns L^-T is orthonormal, and uniform because a rotation of the null space carries over to it.
        turned = np.linalg.solve(roots.swapaxes(1, 2), block[:, :width])
        out[:, group.features] += columns @ turned
    return out
