"""Proposals for a few scalars, tuned during warm-up and frozen after it (DESIGN 5).

A block of d coordinates is proposed, by a coin, from a heavy-tailed independence density fitted to earlier draws
(multivariate t with 5 degrees of freedom) or by a normal random walk of the same shape; before the first fit by the
walk alone. The coin favours independence where warm-up found it accepted often; the walk's length follows its
acceptance (Robbins and Monro 1951).
"""

from collections.abc import Mapping
from math import exp, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockProposal", "StepSize"]

Array = NDArray[np.float64]
_DEGREES = 5.0
_TARGET = 0.35  # between the optimal acceptances of one (0.44) and many (0.23) coordinates
_STEP_TARGET = 0.44
_DECAY = 0.6
# Shares of independence proposals: usually, and where at least `_OFTEN` of them are accepted. A walk that is accepted
# at 0.35 moves as far as one accepted at 0.4.
_SHARES = (0.5, 0.9)
_OFTEN = 0.4
_FEWEST = 20  # draws in a window, per coordinate, before a covariance is fitted


class StepSize:
    """The length of a one-dimensional random walk.

    Parameters
    ----------
    start : float
        First standard deviation.
    target : float
        Acceptance to aim for.
    """

    def __init__(self, start: float, target: float = _STEP_TARGET) -> None:
        self.log_size, self.seen, self.target = log(start), 0, target

    @property
    def size(self) -> float:
        """The standard deviation now."""
        return exp(self.log_size)

    def learn(self, probability: float) -> None:
        """Move towards the target after a step accepted with `probability`."""
        self.seen += 1
        self.log_size += (probability - self.target) / self.seen**_DECAY

    def forget(self, size: float) -> None:
        """Start over from another size."""
        self.log_size, self.seen = log(size), 0

    def arrays(self) -> dict[str, NDArray[Any]]:
        """For storage."""
        return {"step": np.array([self.log_size, self.seen])}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Undo :meth:`arrays`."""
        self.log_size, self.seen = float(arrays["step"][0]), int(arrays["step"][1])


class BlockProposal:
    """The proposal of one block.

    Parameters
    ----------
    spread : (d,)
        Standard deviations of the first random walk.
    """

    def __init__(self, spread: Array) -> None:
        self.root, self.mean, self.fitted = np.diag(spread), np.zeros(len(spread)), False
        self.walk = StepSize(1.0, _TARGET)
        self.window: list[Array] = []
        self.share, self.accepted = _SHARES[0], np.zeros(2)

    def propose(self, rng: np.random.Generator, x: Array) -> tuple[Array, float, bool]:
        """A proposal from x, ``log q(x | proposal) - log q(proposal | x)``, and whether it was a walk."""
        independent = self.fitted and rng.uniform() < self.share
        standard = rng.standard_normal(len(x))
        if not independent:
            return x + self.walk.size * (self.root @ standard), 0.0, True
        heavy = standard / np.sqrt(rng.chisquare(_DEGREES) / _DEGREES)
        proposal = self.mean + self.root @ heavy
        return proposal, self._log_density(x) - self._log_density(proposal), False

    def _log_density(self, x: Array) -> float:
        scaled = np.linalg.solve(self.root, x - self.mean)
        return -0.5 * (_DEGREES + len(x)) * float(np.log1p(scaled @ scaled / _DEGREES))

    def learn(self, x: Array, probability: float, walked: bool) -> None:
        """Record where the block is, and how a walk fared."""
        self.window.append(np.array(x))
        if walked:
            self.walk.learn(probability)
        else:
            self.accepted += [probability, 1.0]

    def fit(self) -> None:
        """End a window: take mean and covariance of its draws, unless they are too few or do not span the block."""
        draws, d = np.array(self.window), self.root.shape[0]
        self.window = []
        if self.accepted[1] >= _FEWEST:
            self.share = _SHARES[int(self.accepted[0] >= _OFTEN * self.accepted[1])]
            self.accepted = np.zeros(2)
        if len(draws) < _FEWEST * d:
            return
        covariance = np.atleast_2d(np.cov(draws.T))
        moved = np.diag(covariance) > 0
        distinct = len(np.unique(draws[:, 0]))
        if not moved.all() or distinct < 4 * d:
            return
        # Shrink towards the diagonal by the weight of d distinct draws, as a guard of the first windows.
        covariance = covariance * (1 - d / (d + distinct)) + np.diag(np.diag(covariance)) * d / (d + distinct)
        self.root, self.mean, self.fitted = np.linalg.cholesky(covariance), draws.mean(axis=0), True
        self.walk.forget(2.38 / np.sqrt(d))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """For storage."""
        window = np.array(self.window).reshape(-1, len(self.mean))
        coin = np.array([self.share, *self.accepted])
        fitted = np.array(self.fitted)
        own = {"root": self.root, "mean": self.mean, "fitted": fitted, "window": window, "coin": coin}
        return own | self.walk.arrays()

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Undo :meth:`arrays`."""
        self.root, self.mean, self.fitted = np.array(arrays["root"]), np.array(arrays["mean"]), bool(arrays["fitted"])
        self.window = list(np.array(arrays["window"]))
        self.share, self.accepted = float(arrays["coin"][0]), np.array(arrays["coin"][1:])
        self.walk.load(arrays)
