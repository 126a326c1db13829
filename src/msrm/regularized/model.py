"""A fitted R-MSRM as plain arrays: all that prediction, calibration and archives need, and nothing of the recording."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msrm.regularized.domain import Grid
from msrm.regularized.filters import Pair
from msrm.regularized.problem import Key
from msrm.regularized.settings import Settings
from msrm.responses import Response

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PairModel:
    """One participant-modality of a fit.

    Attributes
    ----------
    features : (feature,) of str
    loading : (feature, factor)
        Training sds per unit of latent; NaN for features that took no part.
    mean, sd : (feature,)
        Of the training data, in its units; NaN likewise.
    response : Response
        With every parameter fixed.
    residual_variance : float
        Weighted mean squared residual over the training entries, in squared training sds.
    """

    features: NDArray[np.str_]
    loading: Array
    mean: Array
    sd: Array
    response: Response
    residual_variance: float

    @property
    def present(self) -> NDArray[np.bool_]:
        """Features that took part."""
        return np.isfinite(self.mean)


@dataclass(frozen=True)
class RunPaths:
    """The latent paths of one run.

    Attributes
    ----------
    participants : tuple of str
        Owners of the paths; empty when one path serves everyone.
    grid : Grid
    limits : (first, last)
        Between which the response of a usable row must see, seconds.
    paths : (time, path, factor)
    """

    participants: tuple[str, ...]
    grid: Grid
    limits: tuple[float, float]
    paths: Array


@dataclass(frozen=True)
class Model:
    """A fitted R-MSRM.

    Attributes
    ----------
    settings : Settings
    pairs : dict from (participant, modality) to PairModel
    runs : dict from run to RunPaths
    factors : dict from (participant, run, modality) to float
        Each training stream's weight: an entry weighs factor x cell / (finite entries of its row).
    n_participant_runs : int
        Of the training recording.
    system_weight : float
        Of one path system's penalty in the training objective.
    ridges : dict from pair to float
        Weight of each pair's squared loading norm.
    """

    settings: Settings
    pairs: dict[Pair, PairModel]
    runs: dict[str, RunPaths]
    factors: dict[Key, float]
    n_participant_runs: int
    system_weight: float
    ridges: dict[Pair, float]

    @property
    def participants(self) -> tuple[str, ...]:
        """Participants with loadings."""
        return tuple(dict.fromkeys(participant for participant, _ in self.pairs))

    def factor(self, key: Key) -> float:
        """A stream's weight: as in training, or what a training stream of that pair in a run of its own would have."""
        if key in self.factors:
            return self.factors[key]
        participant, _, modality = key
        weight = self.settings.weight
        return weight(modality) / sum(weight(m) for p, m in self.pairs if p == participant) / self.n_participant_runs
