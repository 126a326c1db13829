"""Posterior draws of GP-MSRM: one result for every sampler, as a DataTree for ArviZ and as answers about the model.

`Draws.tree` holds flat variables over (chain, draw, ...) with string coordinates (DESIGN 5), only quantities that a
rotation of the factors does not touch. Loadings in raw features are made on demand from the rotated coordinates that
are kept, predictions from an :class:`~msrm.gp.ensemble.Ensemble`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from msrm.diagnostics import Summary, summary
from msrm.gp import prediction
from msrm.gp.data import Key, PairData
from msrm.gp.ensemble import Ensemble
from msrm.gp.raw_rows import raw_rows
from msrm.recording import Recording

if TYPE_CHECKING:
    from msrm.gp.estimator import GPMSRM

__all__ = ["Draws", "channel_labels"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Draws:
    """Draws from the posterior of a GP-MSRM.

    Attributes
    ----------
    tree : DataTree
        Groups `posterior`, `sample_stats`, `log_likelihood`, `observed_data`, `constant_data`: usable by ArviZ 1 as is.
    model : GPMSRM
        Fitted: the MAP that the chains started from.
    rows : {(participant, modality): (chain, draw, coordinate, k)}
        Loading, offset and run offsets in rotated coordinates, stand-ins of null rows at the end.
    turns : (chain, draw, K, K)
        Rotations that bring each draw's loadings closest to the MAP's (Procrustes), used on demand.
    ensemble : Ensemble
        A few draws in raw features: what predictions average over.
    pairs : {(participant, modality): PairData}
        The data, for raw features on demand.
    """

    tree: xr.DataTree
    model: "GPMSRM"
    rows: dict[Key, Array]
    turns: Array
    ensemble: Ensemble
    pairs: dict[Key, PairData]

    @property
    def n_factors(self) -> int:
        """K."""
        return self.turns.shape[-1]

    @property
    def posterior(self) -> xr.Dataset:
        """The group `posterior` of the tree."""
        return _group(self.tree, "posterior")

    def summary(self, **options: Any) -> Summary:
        """Convergence of every quantity and a verdict; see `msrm.diagnostics.summary`."""
        return summary(self.tree, **options)

    def loading(
        self,
        participant: str,
        modality: str,
        *,
        features: Sequence[str] | None = None,
        aligned: bool = True,
        thin: int = 1,
    ) -> xr.DataArray:
        """Draws of a loading in raw features.

        Parameters
        ----------
        participant, modality : str
        features : sequence of str, optional
            Which features; all by default.
        aligned : bool
            Rotate every draw to the MAP (Procrustes over all loadings); raw draws are free to rotate.
        thin : int
            Keep every so many draws.

        Returns
        -------
        DataArray (chain, draw, feature, factor)
            Units of the parameters: data units per latent sd, standardized where the model standardizes.

        Raises
        ------
        ValueError
            For a pair or feature that is not there.
        """
        key, size = (participant, modality), self.n_factors
        rows, names, kept = self._raw(key, features, thin)
        values = rows[..., :size]
        if aligned:
            values = values @ self.turns[:, ::thin]
        coords = {"chain": self.posterior["chain"].values, "draw": kept, "feature": names}
        coords["factor"] = np.arange(1, size + 1)
        return xr.DataArray(values, coords, ("chain", "draw", "feature", "factor"), name="loading")

    def offset(
        self, participant: str, modality: str, *, features: Sequence[str] | None = None, thin: int = 1
    ) -> xr.DataArray:
        """Draws of an offset in raw features, (chain, draw, feature); parameters and errors as `loading`."""
        rows, names, kept = self._raw((participant, modality), features, thin)
        coords = {"chain": self.posterior["chain"].values, "draw": kept, "feature": names}
        return xr.DataArray(rows[..., self.n_factors], coords, ("chain", "draw", "feature"), name="offset")

    def predict(
        self,
        recording: Recording,
        *,
        targets: Mapping[str, str | Sequence[str]] | None = None,
        source: str = "both",
        times: Any = None,
        noise: bool = False,
        joint: str | None = None,
    ) -> xr.DataTree:
        """As :meth:`msrm.GPMSRM.predict`, averaged over the ensemble: variances include the parameters' uncertainty."""
        answer = partial(
            prediction.predict,
            recording=recording,
            targets=targets,
            source=source,
            times=times,
            noise=noise,
            joint=joint,
        )
        return self.ensemble.average(answer)

    def infer_latent(
        self, recording: Recording | None = None, *, times: Any = None, joint: str | None = None
    ) -> xr.DataTree:
        """As :meth:`msrm.GPMSRM.infer_latent`, averaged over the ensemble with factors aligned to the MAP."""
        return self.ensemble.average(partial(prediction.infer_latent, recording=recording, times=times, joint=joint))

    def transform(self, recording: Recording, *, times: Any = None) -> xr.DataTree:
        """As :meth:`msrm.GPMSRM.transform`, averaged over the ensemble."""
        return self.ensemble.average(partial(prediction.transform, recording=recording, times=times))

    @cached_property
    def _places(self) -> dict[Key, int]:
        return {key: place for place, key in enumerate(self.rows)}

    def _raw(self, key: Key, features: Sequence[str] | None, thin: int) -> tuple[Array, NDArray[Any], NDArray[Any]]:
        """Raw rows (chain, draw, feature, k) of the wanted features and every thin-th draw, with their labels."""
        if key not in self.rows:
            known = ", ".join(f"{p}/{m}" for p, m in self.rows)
            raise ValueError(f"{key[0]}/{key[1]} is not in the draws, which have {known}")
        names = self.ensemble.base.features[key]
        wanted = np.arange(len(names)) if features is None else _places_of(names, features, key)
        chosen = self.rows[key][:, ::thin]
        out = [
            raw_rows(self.pairs[key], rows, self._seeds(chain, np.arange(0, self.rows[key].shape[1], thin), key))[
                :, wanted
            ]
            for chain, rows in enumerate(chosen)
        ]
        return np.array(out), names[wanted], self.posterior["draw"].values[::thin]

    def _seeds(self, chain: int, draws: NDArray[np.intp], key: Key) -> list[tuple[int, ...]]:
        """What the null rows of each draw are seeded by."""
        return [(int(self.tree.attrs["seed"]), chain, int(draw), self._places[key]) for draw in draws]


def channel_labels(features: Mapping[Key, NDArray[Any]]) -> xr.Dataset:
    """Coordinates of the dimension `channel`: participant/modality/feature, and each of the three."""
    columns = [(p, m, str(name)) for (p, m), names in features.items() for name in names]
    text = np.dtypes.StringDType()
    labels = np.array(["/".join(column) for column in columns], text)
    parts = {name: ("channel", np.array([column[i] for column in columns], text)) for i, name in enumerate(_PARTS)}
    return xr.Dataset(coords={"channel": labels} | parts)


_PARTS = ("participant", "modality", "feature")


def _places_of(names: NDArray[Any], wanted: Sequence[str], key: Key) -> NDArray[np.intp]:
    place = {str(name): i for i, name in enumerate(names)}
    missing = [name for name in wanted if name not in place]
    if missing:
        raise ValueError(f"{key[1]!r} of {key[0]} has no feature {missing[0]!r}; it has {len(names)}: {names[0]}, ...")
    return np.array([place[name] for name in wanted], dtype=np.intp)


def _group(tree: xr.DataTree, name: str) -> xr.Dataset:
    node = tree[name]
    assert isinstance(node, xr.DataTree)
    return node.to_dataset(inherit=False)
