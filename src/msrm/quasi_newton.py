"""Bounded quasi-Newton minimization with a metric supplied at every point.

Projected L-BFGS (Nocedal and Wright 2006, 7.2; Bertsekas 1982 for the active bounds): the two-loop recursion over the
free coordinates starts from the point's own inverse metric, rescaled by the newest pair, instead of a multiple of the
identity, so that whitening never has to be undone. Steps are accepted on sufficient decrease only, so the objective
never rises.
Converged means one thing: the decrease that the quasi-Newton model still promises from the projected gradient is below
`tol` of the value. Every other stop has its own reason.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MEMORY = 30
INTERRUPTED = "it was interrupted"
_SUFFICIENT = 1e-4
_STRAIGHT = 0.9
_TRIALS = 20
# A promise counts as convergence after this many pairs if the metric promises at most so many times more; without
# pairs, which find the soft directions that the metric overlooks, it must promise as many times less.
_FEW_PAIRS = 3
_TRUSTED = 100.0


class Point(Protocol):
    """An evaluated point: position, value, gradient, and the inverse metric there."""

    @property
    def x(self) -> Array: ...

    @property
    def value(self) -> float: ...

    @property
    def gradient(self) -> Array: ...

    def inverse_metric(self, gradient: Array) -> Array: ...


@dataclass
class Outcome[P: Point]:
    """How a minimization ended.

    Attributes
    ----------
    point : Point
        The best point.
    n_iter, n_evaluations : int
    converged : bool
    reason : str
        Why it stopped, in words.
    decrement : float
        Decrease that the model still promised, relative to the value.
    history : list of float
        Value at the start and after every accepted step.
    model : QuasiNewton
        What was learned of the curvature; another search of the same coordinates may go on from it.
    """

    point: P
    n_iter: int = 0
    n_evaluations: int = 0
    converged: bool = False
    reason: str = "the iteration limit was reached"
    decrement: float = np.inf
    history: list[float] = field(default_factory=list)
    model: "QuasiNewton | None" = None


def minimize[P: Point](
    evaluate: Callable[[Array], P | None],
    start: P,
    lower: Array,
    upper: Array,
    *,
    max_iter: int,
    tol: float,
    watch: Callable[[P], None] | None = None,
    model: "QuasiNewton | None" = None,
) -> Outcome[P]:
    """Minimize from an evaluated start.

    Parameters
    ----------
    evaluate : callable
        From a position within the bounds to a point; None where the value cannot be computed.
    start : Point
    lower, upper : (coordinate,)
        Infinite where there is no bound.
    max_iter : int
    tol : float
        On the promised decrease relative to the value.
    watch : callable, optional
        Called with every accepted point.
    model : QuasiNewton, optional
        From an earlier search in the same coordinates and bounds.

    Returns
    -------
    Outcome
        KeyboardInterrupt ends the search with the best point so far, not converged.
    """
    model = QuasiNewton(lower, upper) if model is None else model
    out = Outcome(start, history=[start.value], model=model)
    try:
        while out.n_iter < max_iter:
            direction, slope = model.direction(out.point)
            scale = max(abs(out.point.value), np.finfo(float).tiny)
            out.decrement = -0.5 * slope / scale
            if out.decrement <= tol and model.confirms(out.point, tol * scale):
                out.converged, out.reason = True, f"the projected gradient promises less than {tol:g} of the objective"
                return out
            found = _search(evaluate, out, direction, slope, lower, upper)
            if found is None:
                if model.forget():
                    continue
                out.reason = "no step along the projected gradient lowers the objective"
                return out
            model.learn(out.point, found)
            out.point, out.n_iter = found, out.n_iter + 1
            out.history.append(found.value)
            if watch is not None:
                watch(found)
    except KeyboardInterrupt:
        out.reason = INTERRUPTED
        return out
    return out


class QuasiNewton:
    """The last steps and gradient changes, as an inverse Hessian over the free coordinates."""

    def __init__(self, lower: Array, upper: Array) -> None:
        self.lower, self.upper = lower, upper
        self.pairs: list[tuple[Array, Array]] = []

    def direction(self, point: Point) -> tuple[Array, float]:
        """Descent direction and the slope along it."""
        free = _free(point, self.lower, self.upper)
        gradient = np.where(free, point.gradient, 0.0)
        direction = -self._apply(point, gradient, free)
        slope = float(direction @ gradient)
        if not slope < 0 and self.forget():
            return self.direction(point)
        return direction, min(slope, 0.0)

    def confirms(self, point: Point, promised: float) -> bool:
        """Whether so small a promise may be believed: curvatures are known, and the metric's own is not far above."""
        free = _free(point, self.lower, self.upper)
        gradient = np.where(free, point.gradient, 0.0)
        by_metric = 0.5 * float(gradient @ point.inverse_metric(gradient))
        return by_metric <= promised * (_TRUSTED if len(self.pairs) >= _FEW_PAIRS else 1 / _TRUSTED)

    def forget(self) -> bool:
        """Drop every pair; False when there was none."""
        had = bool(self.pairs)
        self.pairs.clear()
        return had

    def learn(self, before: Point, after: Point) -> None:
        """Keep a step where the curvature along it is safely positive."""
        step, change = after.x - before.x, after.gradient - before.gradient
        bend = float(step @ change)
        if bend > 1e-10 * np.sqrt(float(step @ step) * float(change @ change)):
            self.pairs.append((step, change))
            del self.pairs[:-MEMORY]

    def _apply(self, point: Point, gradient: Array, free: NDArray[np.bool_]) -> Array:
        seen = self.pairs if free.all() else [(s * free, y * free) for s, y in self.pairs]
        pairs = [(s, y, float(s @ y)) for s, y in seen]
        pairs = [pair for pair in pairs if pair[2] > 0]
        vector, weights = gradient.copy(), []
        for step, change, bend in reversed(pairs):
            weights.append(float(step @ vector) / bend)
            vector -= weights[-1] * change
        vector = point.inverse_metric(vector) * free
        if pairs:
            _, change, bend = pairs[-1]
            vector *= bend / float(change @ (point.inverse_metric(change) * free))
        for (step, change, bend), weight in zip(pairs, reversed(weights), strict=True):
            vector += (weight - float(change @ vector) / bend) * step
        return vector


def _free(point: Point, lower: Array, upper: Array) -> NDArray[np.bool_]:
    """Coordinates not held at a bound by the gradient."""
    return ~(((point.x <= lower) & (point.gradient > 0)) | ((point.x >= upper) & (point.gradient < 0)))


def _search[P: Point](
    evaluate: Callable[[Array], P | None], out: Outcome[P], direction: Array, slope: float, lower: Array, upper: Array
) -> P | None:
    """A point along the projected direction with sufficient decrease, or None."""
    point, length = out.point, 1.0
    for _ in range(_TRIALS):
        x = np.clip(point.x + length * direction, lower, upper)
        trial = evaluate(x)
        out.n_evaluations += 1
        promised = float(point.gradient @ (x - point.x))
        if trial is None or not np.isfinite(trial.value):
            length *= 0.1
            continue
        if trial.value <= point.value + _SUFFICIENT * promised and promised < 0:
            return _stretched(evaluate, out, trial, direction, slope, length, lower, upper)
        curvature = trial.value - point.value - promised
        shrink = -0.5 * promised / curvature if curvature > 0 else 0.5
        length *= min(max(shrink, 0.1), 0.5)
    return None


def _stretched[P: Point](
    evaluate: Callable[[Array], P | None],
    out: Outcome[P],
    trial: P,
    direction: Array,
    slope: float,
    length: float,
    lower: Array,
    upper: Array,
) -> P:
    """The accepted trial, or a longer step where the slope has hardly changed."""
    ahead = float(trial.gradient @ direction)
    if ahead > _STRAIGHT * slope or length < 1.0:
        return trial
    longer = length * min(4.0, max(1.5, slope / (slope - ahead)) if ahead > slope else 4.0)
    further = evaluate(np.clip(out.point.x + longer * direction, lower, upper))
    out.n_evaluations += 1
    return further if further is not None and further.value < trial.value else trial
