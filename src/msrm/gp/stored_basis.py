"""Rotated bases as plain arrays: raw features of stored draws without the recording (DESIGN 3.2).

A rotation is kept as C of ``V = [X; mean]' C``, which needs the data again. An archive that is to give raw rows on its
own holds V itself, (feature, coordinate) for each group of features that was rotated: as large as the data, so stored
up to a limit only (:mod:`msrm.gp.draws_tree`).
"""

from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from msrm.gp.data import PairData
from msrm.rotation import MaskGroup

__all__ = ["StoredBasis", "StoredPair", "basis_bytes", "pair_from_tree", "stored_pair"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StoredBasis:
    """The rotation of one participant-modality.

    Attributes
    ----------
    n_features, n_coordinates : int
    groups : tuple of MaskGroup
        Without coefficients.
    bases : tuple of (feature of the group, coordinate of the group) or None
        V; None where features are their own coordinates.
    """

    n_features: int
    n_coordinates: int
    groups: tuple[MaskGroup, ...]
    bases: tuple[Array | None, ...]

    def to_features(self, coordinates: Array) -> Array:
        """Raw features of coordinates (coordinate, ...); NaN for features that take no part."""
        out = np.full((self.n_features, *coordinates.shape[1:]), np.nan)
        for group, basis in zip(self.groups, self.bases, strict=True):
            own = coordinates[group.columns]
            out[group.features] = own if basis is None else np.tensordot(basis, own, 1)
        return out

    def to_reduced(self, features: Array) -> Array:
        """Coordinates of raw features (feature, ...); what lies outside the span is dropped."""
        out = np.zeros((self.n_coordinates, *features.shape[1:]))
        for group, basis in zip(self.groups, self.bases, strict=True):
            own = features[group.features]
            out[group.columns] = own if basis is None else np.tensordot(basis.T, own, 1)
        return out


@dataclass(frozen=True, eq=False)
class StoredPair:
    """What raw rows need of a participant-modality; attributes as of :class:`~msrm.gp.data.PairData`."""

    participant: str
    modality: str
    n_features: int
    n_coordinates: int
    patterns: NDArray[np.bool_]
    null_counts: NDArray[np.intp]
    reduced: StoredBasis


def basis_bytes(pair: PairData | StoredPair) -> int:
    """Size of a pair's basis."""
    if isinstance(pair, StoredPair):
        return sum(basis.nbytes for basis in pair.reduced.bases if basis is not None)
    groups = () if pair.reduced is None else pair.reduced.groups
    return sum(8 * len(g.features) * (g.columns.stop - g.columns.start) for g in groups if g.coefficients is not None)


def stored_pair(pair: PairData | StoredPair) -> StoredPair:
    """A pair with its basis made explicit, by one pass over the data."""
    if isinstance(pair, StoredPair):
        return pair
    reduced, bases = pair.reduced, []
    if reduced is None:
        raise ValueError(f"{pair.participant}/{pair.modality} is not rotated: its rows are raw already.")
    whole = reduced.to_features(np.eye(reduced.n_coordinates)) if basis_bytes(pair) else None
    for group in reduced.groups:
        rotated = whole is not None and group.coefficients is not None
        bases.append(whole[group.features, group.columns].copy() if rotated and whole is not None else None)
    groups = tuple(_bare(group.features, group.columns, group.rows) for group in reduced.groups)
    basis = StoredBasis(pair.n_features, pair.n_coordinates, groups, tuple(bases))
    return StoredPair(
        pair.participant, pair.modality, pair.n_features, pair.n_coordinates, pair.patterns, pair.null_counts, basis
    )


def pair_tree(pair: StoredPair) -> dict[str, xr.Dataset]:
    """The nodes that hold a pair, by place below it."""
    facts = {"participant": pair.participant, "modality": pair.modality}
    nodes = {
        "": xr.Dataset(
            {"patterns": (("pattern", "row"), pair.patterns), "null_counts": ("pattern", pair.null_counts)},
            attrs=facts | {"n_features": pair.n_features, "n_coordinates": pair.n_coordinates},
        )
    }
    for place, (group, basis) in enumerate(zip(pair.reduced.groups, pair.reduced.bases, strict=True)):
        held = {} if basis is None else {"basis": (("feature_place", "coordinate"), basis)}
        nodes[f"/group-{place}"] = xr.Dataset(
            {"features": ("feature_place", group.features), "rows": ("row", group.rows), **held},
            attrs={"start": group.columns.start, "stop": group.columns.stop},
        )
    return nodes


def pair_from_tree(tree: xr.DataTree) -> StoredPair:
    """Undo :func:`pair_tree`."""
    own, groups, bases = tree.to_dataset(inherit=False), [], []
    for place in range(len(tree.children)):
        node = tree.children[f"group-{place}"].to_dataset(inherit=False)
        columns = slice(int(node.attrs["start"]), int(node.attrs["stop"]))
        groups.append(_bare(node["features"].values.astype(np.intp), columns, node["rows"].values))
        bases.append(node["basis"].values if "basis" in node else None)
    features, coordinates = int(own.attrs["n_features"]), int(own.attrs["n_coordinates"])
    return StoredPair(
        str(own.attrs["participant"]),
        str(own.attrs["modality"]),
        features,
        coordinates,
        own["patterns"].values,
        own["null_counts"].values.astype(np.intp),
        StoredBasis(features, coordinates, tuple(groups), tuple(bases)),
    )


def _bare(features: NDArray[np.intp], columns: slice, rows: NDArray[np.bool_]) -> MaskGroup:
    return MaskGroup(features, columns, rows, None, np.zeros(len(features)))
