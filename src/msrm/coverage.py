"""Which stretches of latent time data see, and whether a response's support lies inside one of them."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from msrm.regularized.domain import TIME_TOLERANCE, segments
from msrm.responses import Response

Interval = tuple[float, float]


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
