"""What a user may ask of the NUTS sampler, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

__all__ = ["CHAIN_METHODS", "LARGEST_DENSE", "METRICS", "NutsSettings"]

METRICS = ("diagonal", "dense")
CHAIN_METHODS = ("sequential", "vectorized", "processes")
LARGEST_DENSE = 1000  # a dense metric is learned from draws: it needs more of them than it has rows
_DEEPEST = 15


@dataclass(frozen=True)
class NutsSettings:
    """Settings of NUTS.

    Attributes
    ----------
    metric : {"diagonal", "dense"}
        Learned in warm-up, on coordinates that are whitened before.
    chain_method : {"sequential", "vectorized", "processes"}
    target_accept : float
        Mean acceptance that warm-up tunes the step to.
    max_tree_depth : int
        Trajectories have at most 2 to this power leapfrog steps.

    Raises
    ------
    ValueError
        For a value that is not one of these.
    """

    metric: str = "diagonal"
    chain_method: str = "sequential"
    target_accept: float = 0.8
    max_tree_depth: int = 10

    def __post_init__(self) -> None:
        for name, known in (("metric", METRICS), ("chain_method", CHAIN_METHODS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, found {getattr(self, name)!r}.")
        if not isinstance(self.target_accept, int | float | np.number) or not 0.0 < self.target_accept < 1.0:
            raise ValueError(f"target_accept must lie between 0 and 1, found {self.target_accept!r}.")
        deepest = self.max_tree_depth
        if isinstance(deepest, bool) or not isinstance(deepest, int | np.integer) or not 1 <= deepest <= _DEEPEST:
            raise ValueError(f"max_tree_depth must be an integer from 1 to {_DEEPEST}, found {self.max_tree_depth!r}.")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """The settings of some names.

        Raises
        ------
        TypeError
            For a name that is no setting.
        ValueError
            For an unusable value.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(settings.keys() - set(known)):
            raise TypeError(f'{", ".join(unknown)}: no setting of sampler="nuts", which has {", ".join(known)}.')
        return cls(**settings)

    def check_size(self, size: int) -> None:
        """Refuse a dense metric that draws cannot fill.

        Raises
        ------
        ValueError
            Naming the dimension, the limit and the remedy.
        """
        if self.metric == "dense" and size > LARGEST_DENSE:
            raise ValueError(
                f'metric="dense" would learn a {size} x {size} matrix from the warm-up; the limit is {LARGEST_DENSE}. '
                'Use metric="diagonal", which is whitened at the start, or sampler="gibbs".'
            )
