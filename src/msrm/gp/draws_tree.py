"""Draws as a tree of plain numbers and text, and back: what their archive holds (DESIGN 5, 6).

The groups that ArviZ reads lie at the top, so that a plain ``xarray.open_datatree`` of the archive works there. Beside
them: ``map`` (the fit that the chains started from), ``rows`` (rotated loadings and offsets of every draw),
``alignment``, ``ensemble`` (the members that predictions average over) and, where it is small or asked for, ``bases``:
what turns rotated rows into raw features.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from msrm.gp.data import Key
from msrm.gp.ensemble import Ensemble
from msrm.gp.fitted import FEATURE_KINDS
from msrm.gp.stored_basis import basis_bytes, pair_from_tree, pair_tree, stored_pair

if TYPE_CHECKING:
    from msrm.gp.draws import Draws

__all__ = ["ARVIZ_GROUPS", "BASIS_BYTES", "draws_parts", "draws_tree"]

ARVIZ_GROUPS = ("posterior", "sample_stats", "log_likelihood", "observed_data", "constant_data")
BASIS_BYTES = 2**28  # of all bases together: stored up to here unless asked for or refused
_SUMS = ("precision", "information", "coefficients")
_SUM_DIMS = {
    "precision": ("member", "class", "factor", "other_factor"),
    "information": ("member", "node", "factor"),
    "coefficients": ("member", "node", "end"),
}


def draws_tree(draws: "Draws", *, bases: bool | None = None) -> xr.DataTree:
    """The tree of an archive of draws.

    Parameters
    ----------
    draws : Draws
    bases : bool, optional
        Store what raw features need; by default up to 256 MB.

    Raises
    ------
    ValueError
        When they are asked for and the draws do not have them.
    """
    nodes = {f"/{name}": _plain_text(node.to_dataset(inherit=False)) for name, node in draws.tree.children.items()}
    nodes["/alignment"] = xr.Dataset({"turn": (("chain", "draw", "factor", "aligned_factor"), draws.turns)})
    for place, ((participant, modality), rows) in enumerate(draws.rows.items()):
        nodes[f"/rows/{place}"] = xr.Dataset(
            {"row": (("chain", "draw", "coordinate", "column"), rows)},
            attrs={"participant": participant, "modality": modality},
        )
    if bases and not draws.pairs:
        raise ValueError("bases=True: these draws have no data at hand; call with_recording(recording) first.")
    size = sum(basis_bytes(pair) for pair in draws.pairs.values())
    if draws.pairs and (size <= BASIS_BYTES if bases is None else bases):
        for place, key in enumerate(draws.rows):
            for below, dataset in pair_tree(stored_pair(draws.pairs[key])).items():
                nodes[f"/bases/{place}{below}"] = dataset
    nodes |= _ensemble_nodes(draws.ensemble)
    nodes |= {f"/map{node.path.rstrip('/')}": node.to_dataset(inherit=False) for node in draws.model.to_tree().subtree}
    tree = xr.DataTree.from_dict(nodes)
    tree.attrs = {name: value for name, value in draws.tree.attrs.items() if name != "kind"}
    return tree


def draws_parts(tree: xr.DataTree) -> dict[str, Any]:
    """The parts of the draws that a tree made by :func:`draws_tree` holds; the MAP as its own tree."""
    rows: dict[Key, NDArray[np.float64]] = {}
    for place in range(len(tree["rows"].children)):
        node = _dataset(tree, f"rows/{place}")
        rows[str(node.attrs["participant"]), str(node.attrs["modality"])] = node["row"].values
    pairs = {}
    if "bases" in tree.children:
        found = [pair_from_tree(tree["bases"].children[str(place)]) for place in range(len(rows))]
        pairs = {(pair.participant, pair.modality): pair for pair in found}
    own = {name: node.to_dataset(inherit=False) for name, node in tree.children.items() if name in ARVIZ_GROUPS}
    flat = xr.DataTree.from_dict(own)
    flat.attrs = {name: value for name, value in tree.attrs.items() if name not in _ORIGIN}
    return {
        "tree": flat,
        "rows": rows,
        "turns": _dataset(tree, "alignment")["turn"].values,
        "pairs": pairs,
        "map": tree.children["map"].copy(),
        "ensemble": _ensemble_arrays(tree.children["ensemble"]),
    }


_ORIGIN = ("kind", "msrm_format", "msrm_version", "created")


def _plain_text(dataset: xr.Dataset) -> xr.Dataset:
    """Variable-width text as objects, which netCDF holds."""
    wide = {str(n): v for n, v in dataset.variables.items() if v.dtype.kind == "T"}
    return dataset.assign({n: (v.dims, v.values.astype(object), v.attrs) for n, v in wide.items()})


def _dataset(tree: xr.DataTree, path: str) -> xr.Dataset:
    node = tree[path]
    assert isinstance(node, xr.DataTree)
    return node.to_dataset(inherit=False)


def _ensemble_nodes(ensemble: Ensemble) -> dict[str, xr.Dataset]:
    nodes = {"/ensemble": xr.Dataset({"member_of": (("member", "chain_and_draw"), ensemble.members)})}
    if ensemble.weights is not None:
        nodes["/ensemble"]["weight"] = ("member", ensemble.weights)
    for name, values in ensemble.parameters.items():
        kind = name.split("/")[0]
        dims = ("member", "feature", "factor")[: values.ndim] if kind in FEATURE_KINDS else ("member",)
        nodes[f"/ensemble/parameters/{name}"] = xr.Dataset({"value": (dims, values)})
    for place in ensemble.precision:
        held = {kind: getattr(ensemble, kind).get(place) for kind in _SUMS}
        nodes["/ensemble/nodes/" + "/".join(place)] = xr.Dataset(
            {kind: (_SUM_DIMS[kind], values) for kind, values in held.items() if values is not None}
        )
    return nodes


def _ensemble_arrays(tree: xr.DataTree) -> dict[str, Any]:
    own = tree.to_dataset(inherit=False)
    sums: dict[str, dict[tuple[str, str], Any]] = {kind: {} for kind in _SUMS}
    for run, groups in tree["nodes"].children.items():
        for modality, node in groups.children.items():
            for kind in _SUMS:
                if kind in node.variables:
                    sums[kind][run, modality] = node[kind].values
    root = tree["parameters"]
    parameters = {
        node.path.removeprefix(root.path).lstrip("/"): node["value"].values
        for node in root.subtree
        if "value" in node.variables
    }
    weights = own["weight"].values if "weight" in own else None
    return {"parameters": parameters, **sums, "members": own["member_of"].values, "weights": weights}
