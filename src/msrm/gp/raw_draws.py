"""Posterior draws as they are held, and raw features from them: loadings and offsets on demand (DESIGN 3.2, 5).

`tree` holds flat variables over (chain, draw, ...) with string coordinates, only quantities that a rotation of the
factors does not touch. Loadings in raw features are made from the rotated coordinates that are kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from msrm.asking import takes_recording
from msrm.gp.data import Key, PairData
from msrm.gp.ensemble import Ensemble
from msrm.gp.raw_file import write_loading_draws
from msrm.gp.raw_rows import raw_rows
from msrm.gp.stored_basis import StoredPair
from msrm.recording import Recording

if TYPE_CHECKING:
    from msrm.gp.estimator import GPMSRM

__all__ = ["RawDraws", "channel_labels"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RawDraws:
    """Draws from the posterior of a GP-MSRM, and their raw features.

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
    pairs : {(participant, modality): PairData or StoredPair}
        The data or the stored bases, for raw features on demand; empty when an archive holds neither
        (:meth:`with_recording`).
    """

    tree: xr.DataTree
    model: "GPMSRM"
    rows: dict[Key, Array]
    turns: Array
    ensemble: Ensemble
    pairs: Mapping[Key, PairData | StoredPair]

    @property
    def n_factors(self) -> int:
        """K."""
        return self.turns.shape[-1]

    @property
    def recording_digest_(self) -> str:
        """Of the recording that the draws were made from."""
        return str(self.tree.attrs["recording_digest"])

    @property
    def posterior(self) -> xr.Dataset:
        """The group `posterior` of the tree."""
        return _group(self.tree, "posterior")

    def loading(
        self,
        participant: str,
        modality: str,
        *,
        features: range | Sequence[str] | None = None,
        aligned: bool = True,
        thin: int = 1,
    ) -> xr.DataArray:
        """Draws of a loading in raw features.

        Parameters
        ----------
        participant, modality : str
        features : range or sequence of str, optional
            Positions or names; all by default.
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
        self, participant: str, modality: str, *, features: range | Sequence[str] | None = None, thin: int = 1
    ) -> xr.DataArray:
        """Draws of an offset in raw features, (chain, draw, feature); parameters and errors as `loading`."""
        rows, names, kept = self._raw((participant, modality), features, thin)
        coords = {"chain": self.posterior["chain"].values, "draw": kept, "feature": names}
        return xr.DataArray(rows[..., self.n_factors], coords, ("chain", "draw", "feature"), name="offset")

    @takes_recording
    def with_recording(self, recording: Recording) -> Self:
        """The same draws with the recording they were made from at hand, for raw features.

        Raises
        ------
        ValueError
            For another recording.
        """
        self.check_recording(recording)
        likelihood, _ = self.model.prepared(recording, reduce=True, standardization=self.model.model_.standardization)
        return replace(self, pairs={pair.key: pair for pair in likelihood.nodes.pairs})

    @takes_recording
    def check_recording(self, recording: Recording) -> None:
        """Raise ValueError unless the draws were made from this recording."""
        digest = str(self.tree.attrs["recording_digest"])
        if recording.digest() != digest:
            raise ValueError(
                f"The draws were made from the recording with digest {digest[:12]}..., not {recording.digest()[:12]}..."
            )

    def write_loadings(
        self,
        path: str | Path,
        participant: str,
        modality: str,
        *,
        features: range | Sequence[str] | None = None,
        aligned: bool = True,
    ) -> Path:
        """Write draws of a loading in raw features to a netCDF-4 file, in pieces that fit in memory.

        Parameters
        ----------
        path : path-like
        participant, modality : str
        features : range or sequence of str, optional
            Positions such as ``range(0, 5000)``, or names; all by default.
        aligned : bool
            As in `loading`.

        Returns
        -------
        Path
            ``loading`` (chain, draw, feature, factor), with the archive's seal.

        Raises
        ------
        ValueError, OSError
            For a pair or feature that is not there, or a file that cannot be written.
        """
        key = participant, modality
        pair, names = self._pair(key), self.ensemble.base.features[key]
        wanted = _places_of(names, features, key)
        facts = {"participant": participant, "modality": modality, "n_factors": self.n_factors, "kind": "Loadings"}
        facts["recording_digest"] = str(self.tree.attrs["recording_digest"])
        turns = self.turns if aligned else None
        return write_loading_draws(
            Path(path), pair, self.rows[key], turns, names[wanted], wanted, partial(self._seeds, key=key), facts
        )

    @cached_property
    def _places(self) -> dict[Key, int]:
        return {key: place for place, key in enumerate(self.rows)}

    def _raw(
        self, key: Key, features: range | Sequence[str] | None, thin: int
    ) -> tuple[Array, NDArray[Any], NDArray[Any]]:
        """Raw rows (chain, draw, feature, k) of the wanted features and every thin-th draw, with their labels."""
        pair, names = self._pair(key), self.ensemble.base.features[key]
        wanted = _places_of(names, features, key)
        kept = np.arange(0, self.rows[key].shape[1], thin)
        out = [
            raw_rows(pair, rows, self._seeds(chain, kept, key))[:, wanted]
            for chain, rows in enumerate(self.rows[key][:, ::thin])
        ]
        return np.array(out), names[wanted], self.posterior["draw"].values[::thin]

    def _pair(self, key: Key) -> PairData | StoredPair:
        """What turns a pair's rows back into raw features."""
        if key not in self.rows:
            known = ", ".join(f"{p}/{m}" for p, m in self.rows)
            raise ValueError(
                f"{key[0]}/{key[1]} is not in the draws, which have {known}; someone whom calibrate added has "
                f"ensemble.parameters['loading/{key[0]}/{key[1]}'], a loading for each member"
            )
        if key not in self.pairs:
            raise ValueError(
                f"Raw features of {key[0]}/{key[1]} need the recording: the archive was saved without its bases. "
                "Use draws.with_recording(recording), or save with bases=True."
            )
        return self.pairs[key]

    def _seeds(self, chain: int, draws: NDArray[np.intp], key: Key) -> list[tuple[int, ...]]:
        """What the null rows of each draw are seeded by."""
        return [(int(self.tree.attrs["seed"]), chain, int(draw), self._places[key]) for draw in draws]


def channel_labels(features: Mapping[Key, NDArray[Any]]) -> xr.Dataset:
    """The dimension `channel`, labelled participant/modality/feature, and each of the three."""
    columns = [(p, m, str(name)) for (p, m), names in features.items() for name in names]
    text = np.dtypes.StringDType()
    labels = np.array(["/".join(column) for column in columns], text)
    parts = {name: ("channel", np.array([column[i] for column in columns], text)) for i, name in enumerate(_PARTS)}
    return xr.Dataset(parts, {"channel": labels})


_PARTS = ("participant", "modality", "feature")


def _places_of(names: NDArray[Any], wanted: range | Sequence[str] | None, key: Key) -> NDArray[np.intp]:
    """Positions of features given by name or position."""
    if wanted is None:
        return np.arange(len(names))
    if isinstance(wanted, range):
        places = np.array(wanted, dtype=np.intp)
        if len(places) and not 0 <= places.min() <= places.max() < len(names):
            raise ValueError(f"{key[1]!r} of {key[0]} has {len(names)} features, positions 0 to {len(names) - 1}")
        return places
    place = {str(name): i for i, name in enumerate(names)}
    missing = [name for name in wanted if name not in place]
    if missing:
        raise ValueError(f"{key[1]!r} of {key[0]} has no feature {missing[0]!r}; it has {len(names)}: {names[0]}, ...")
    return np.array([place[name] for name in wanted], dtype=np.intp)


def _group(tree: xr.DataTree, name: str) -> xr.Dataset:
    node = tree[name]
    assert isinstance(node, xr.DataTree)
    return node.to_dataset(inherit=False)
