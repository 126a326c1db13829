"""Draws of a loading in raw features, written to a file piece by piece: as large as features times draws (DESIGN 5)."""

from pathlib import Path
from typing import Any

import netCDF4
import numpy as np

from msrm.gp.raw_rows import raw_rows
from msrm.gp.stored_basis import StoredPair
from msrm.sealed import replacing, seal

__all__ = ["write_loading_draws"]

_PIECE_BYTES = 2**26  # of raw rows at once


def write_loading_draws(
    path: Path,
    pair: Any,
    rows: np.ndarray,
    turns: np.ndarray | None,
    names: np.ndarray,
    wanted: np.ndarray,
    seeds: Any,
    attributes: dict[str, Any],
) -> Path:
    """Write ``loading`` (chain, draw, feature, factor) of some features as sealed netCDF-4.

    Parameters
    ----------
    path : Path
    pair : PairData or StoredPair
    rows : (chain, draw, coordinate, k)
    turns : (chain, draw, K, K) or None
        Rotations of the factors.
    names : (feature,) of str
        Of the wanted features.
    wanted : (feature,) int
    seeds : callable
        ``seeds(chain, draws)``: those of the null rows.
    attributes : dict
    """
    n_chains, n_draws = rows.shape[:2]
    size = attributes["n_factors"]
    features = pair.n_features if isinstance(pair, StoredPair) or pair.reduced is not None else len(names)
    piece = max(1, _PIECE_BYTES // (8 * features * rows.shape[-1]))
    with replacing(path) as aside:
        try:
            with netCDF4.Dataset(aside, "w", format="NETCDF4") as file:
                sizes = {"chain": n_chains, "draw": n_draws, "feature": len(names), "factor": size}
                for dimension, count in sizes.items():
                    file.createDimension(dimension, count)
                labels = {"chain": np.arange(n_chains), "draw": np.arange(n_draws), "factor": np.arange(1, size + 1)}
                for dimension, values in labels.items():
                    file.createVariable(dimension, "i8", (dimension,), fill_value=False)[...] = values
                file.createVariable("feature", str, ("feature",))[...] = names.astype(object)
                target = file.createVariable("loading", "f8", tuple(sizes), fill_value=False)
                for chain in range(n_chains):
                    for start in range(0, n_draws, piece):
                        part = slice(start, min(start + piece, n_draws))
                        raw = raw_rows(pair, rows[chain, part], seeds(chain, np.arange(part.start, part.stop)))
                        loading = raw[:, wanted, :size]
                        target[chain, part] = loading if turns is None else loading @ turns[chain, part]
                for name, value in attributes.items():
                    file.setncattr(name, value)
        except RuntimeError as error:  # netCDF's own word for any failed write
            raise OSError(f"cannot write {path}: {error}; is the disk full or a quota reached?") from error
        seal(aside)
    return path
