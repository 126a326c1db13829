"""Which stretches of latent time data see, and whether a response's support lies inside one of them."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from msrm.responses import Response

Interval = tuple[float, float]

TIME_TOLERANCE = 1e-9  # s
_SAME_INTERVAL = 1 + 1e-9
GAP = 2.0  # a gap splits cells where it exceeds this many median intervals


def segments(times: NDArray[np.float64]) -> tuple[list[slice], float]:
    """Stretches of increasing times without a gap, and the median interval (NaN for a single row)."""
    if len(times) == 1:
        return [slice(0, 1)], np.nan
    intervals = np.diff(times)
    median = float(np.median(intervals))
    cuts = np.flatnonzero(intervals > GAP * _SAME_INTERVAL * median) + 1
    edges = [0, *cuts.tolist(), len(times)]
    return [slice(a, b) for a, b in pairwise(edges)], median


def seen(times: NDArray[np.float64], response: Response) -> list[Interval]:
    """Stretches of latent time that rows see: their segments without gaps, widened by the response's support."""
    if not len(times):
        return []
    low, high = response.support()
    return [(float(times[piece][0] - high), float(times[piece][-1] - low)) for piece in segments(times)[0]]


def merged(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same stretches, disjoint and increasing."""
    out: list[Interval] = []
    for start, stop in sorted(intervals):
        if out and start <= out[-1][1] + TIME_TOLERANCE:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return tuple(out)


def inside(times: NDArray[np.float64], response: Response, intervals: Sequence[Interval]) -> NDArray[np.bool_]:
    """Times (time,) whose response's support lies inside one of the disjoint stretches."""
    low, high = response.support()
    out = np.zeros(len(times), bool)
    for start, stop in intervals:
        out |= (times - high >= start - TIME_TOLERANCE) & (times - low <= stop + TIME_TOLERANCE)
    return out
