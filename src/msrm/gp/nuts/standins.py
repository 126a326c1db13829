"""Null rows as a few more coordinates whose data are zero: the likelihood needs no word about them (DESIGN 3.2).

The n rows [w b c...] of k numbers that belong to rotated features without data enter only through their Gram matrix
``F F'``. Under the prior N(0, diag(s^2)) that is Wishart, so ``F = diag(s) B`` with B lower triangular,
``B_jj ~ chi(n - j)`` for j = 0, 1, ... and ``B_ij ~ N(0, 1)`` below (Bartlett 1933). Column j of F is the row of
*stand-in* j. Where n < k the rows stand for themselves. Which scalars there are does not change: what a stand-in adds
to their count is taken from ``null_counts``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from msrm.gp.data import Key, NodeLayout, PairData

__all__ = ["NullBlock", "null_blocks", "stored_rows", "with_standins"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class NullBlock:
    """The stand-ins of one pair and mask pattern.

    Attributes
    ----------
    pattern : int
    start : int
        First of their coordinates in the layout with stand-ins.
    width : int
        Stand-ins: k, or the null rows where those are fewer.
    count : int
        Null rows.
    k : int
        Numbers of a row.
    """

    pattern: int
    start: int
    width: int
    count: int
    k: int

    @property
    def span(self) -> slice:
        """Their coordinates."""
        return slice(self.start, self.start + self.width)

    @property
    def factored(self) -> bool:
        """Whether they are columns of a triangular factor rather than the rows themselves."""
        return self.count >= self.k


def null_blocks(pair: PairData, k: int) -> tuple[NullBlock, ...]:
    """The stand-ins that a pair without any needs.

    Parameters
    ----------
    pair : PairData
    k : int
        Numbers of a row: factors, offset and run offsets.
    """
    blocks, start = [], pair.n_coordinates
    for pattern in np.flatnonzero(pair.null_counts):
        count = int(pair.null_counts[pattern])
        blocks.append(NullBlock(int(pattern), start, min(count, k), count, k))
        start += blocks[-1].width
    return tuple(blocks)


def with_standins(layout: NodeLayout, widths: Mapping[Key, int]) -> NodeLayout:
    """The layout with stand-ins among the coordinates of its pairs.

    Parameters
    ----------
    layout : NodeLayout
        In rotated features.
    widths : {(participant, modality): int}
        k of each pair.
    """
    return replace(layout, pairs=tuple(_extended(pair, null_blocks(pair, widths[pair.key])) for pair in layout.pairs))


def _extended(pair: PairData, blocks: tuple[NullBlock, ...]) -> PairData:
    added = sum(block.width for block in blocks)
    if not added or pair.reduced is None:
        return pair
    counts = pair.null_counts.copy()
    for block in blocks:
        counts[block.pattern] -= block.width
    values = tuple(np.hstack([one, np.zeros((len(one), added))]) for one in pair.reduced.values)
    which = np.concatenate([np.full(block.width, block.pattern) for block in blocks])
    return replace(
        pair,
        pattern=np.concatenate([pair.pattern, which]),
        null_counts=counts,
        reduced=replace(pair.reduced, values=values),
    )


def stored_rows(rows: Array, blocks: tuple[NullBlock, ...]) -> Array:
    """Rows as the chains store them (:mod:`msrm.gp.gibbs.design`): k stand-ins a block, zero where there are fewer."""
    if not blocks:
        return rows
    parts = [rows[: blocks[0].start]]
    for block in blocks:
        parts += [rows[block.span], np.zeros((block.k - block.width, block.k))]
    return np.concatenate(parts)
