"""A fitted GP-MSRM as a tree of plain numbers and text, and back: what an archive holds (DESIGN 6)."""

from dataclasses import asdict
from typing import Any

import numpy as np
import xarray as xr

from msrm.gp.fitted import FEATURE_KINDS, FittedGP, Standardization, TrainingNodes
from msrm.gp.map import StartRecord
from msrm.gp.model import GPDensity
from msrm.nodes import GroupStatistics
from msrm.plain import arguments_from_plain, to_plain


def fitted_tree(model: GPDensity, fitted: FittedGP) -> dict[str, xr.Dataset]:
    """The nodes that hold an estimator's arguments and its fitted model."""
    nodes = {"/settings": xr.Dataset(attrs=model_arguments(model))}
    nodes["/model"] = xr.Dataset(
        attrs={
            "backend": fitted.backend,
            "step": fitted.step,
            "coarse_step": fitted.coarse_step,
            "moments": fitted.moments,
            "residual": sorted(fitted.residual),
            "edges": fitted.edges,
        }
    )
    for name, value in fitted.parameters.items():
        kind, *rest = name.split("/")
        if kind in FEATURE_KINDS:
            features = fitted.features[rest[0], rest[-1]]
            dims = ("feature", "factor") if kind == "loading" else ("feature",)
            nodes[f"/parameters/{name}"] = xr.Dataset({"value": (dims, value)}, {"feature": features})
        else:
            nodes[f"/parameters/{name}"] = xr.Dataset({"value": ((), np.asarray(value, float))})
    for (participant, modality), scaling in fitted.standardization.items():
        nodes[f"/standardization/{participant}/{modality}"] = xr.Dataset(
            {"mean": ("feature", scaling.mean), "scale": ("feature", scaling.scale)}
        )
    for run, groups in fitted.runs.items():
        nodes[f"/training/{run}"] = xr.Dataset(attrs={"domain": list(fitted.domains[run])})
        for modality, own in groups.items():
            nodes[f"/training/{run}/{modality}"] = _nodes_dataset(own)
    return nodes


def fitted_from_tree(tree: xr.DataTree) -> tuple[dict[str, Any], FittedGP]:
    """Constructor arguments and fitted model of a tree made by :func:`fitted_tree`."""
    arguments = arguments_from_plain(_facts(tree["settings"]))
    arguments["run_offsets"] = tuple(arguments["run_offsets"])
    specification = GPDensity(**arguments).specification
    parameters: dict[str, np.ndarray] = {}
    features: dict[tuple[str, str], np.ndarray] = {}
    root = tree["parameters"]
    for node in root.subtree:
        if "value" in node.variables:
            own = node.to_dataset(inherit=False)
            name = node.path.removeprefix(root.path).lstrip("/")
            parameters[name] = own["value"].values
            kind, *rest = name.split("/")
            if kind == "loading":
                features[rest[0], rest[1]] = own["feature"].values.astype(str)
    standardization = {}
    if "standardization" in tree.children:
        for participant, group in tree["standardization"].children.items():
            for modality, node in group.children.items():
                own = node.to_dataset(inherit=False)
                standardization[participant, modality] = Standardization(own["mean"].values, own["scale"].values)
    runs, domains = {}, {}
    for run, group in tree["training"].children.items():
        first, last = group.attrs["domain"]
        domains[run] = float(first), float(last)
        runs[run] = {modality: _nodes_from(node) for modality, node in group.children.items()}
    attrs = tree["model"].attrs
    fitted = FittedGP(
        specification,
        str(attrs["edges"]),
        str(attrs["backend"]),
        float(attrs["step"]),
        float(attrs["coarse_step"]),
        int(attrs["moments"]),
        frozenset(attrs["residual"]),
        features,
        standardization,
        parameters,
        runs,
        domains,
    )
    return arguments, fitted


def starts_tree(starts: tuple[StartRecord, ...]) -> dict[str, xr.Dataset]:
    """The nodes that hold how every start fared."""
    return {f"/starts/{number}": xr.Dataset(attrs=asdict(start)) for number, start in enumerate(starts)}


def starts_from_tree(tree: xr.DataTree) -> tuple[StartRecord, ...]:
    """The starts of a tree made by :func:`starts_tree`."""
    return tuple(StartRecord(**_facts(tree[f"starts/{number}"])) for number in range(len(tree["starts"].children)))


def _facts(node: xr.DataTree | xr.DataArray) -> dict[str, Any]:
    return {str(name): value for name, value in node.attrs.items()}


def _nodes_dataset(own: TrainingNodes) -> xr.Dataset:
    statistics = own.statistics
    variables: dict[str, Any] = {
        "precision": (("class", "factor", "other_factor"), statistics.precision),
        "index": (("node",), statistics.index),
        "information": (("node", "factor"), statistics.information),
    }
    if own.pairs is not None and statistics.coefficients is not None:
        variables["pairs"] = (("node", "end"), own.pairs)
        variables["coefficients"] = (("node", "end"), statistics.coefficients)
    return xr.Dataset(variables, {"time": ("time", own.times, {"units": "s"})})


def _nodes_from(tree: xr.DataTree) -> TrainingNodes:
    node = tree.to_dataset(inherit=False)
    pairs = node["pairs"].values if "pairs" in node.variables else None
    coefficients = node["coefficients"].values if "coefficients" in node.variables else None
    statistics = GroupStatistics(
        node["precision"].values, node["index"].values.astype(np.intp), node["information"].values, coefficients
    )
    return TrainingNodes(node["time"].values, pairs, statistics)


def model_arguments(model: GPDensity) -> dict[str, Any]:
    """An estimator's arguments as plain tables, numbers and text."""
    plain = model.get_params()
    plain["responses"] = {m: to_plain(response) for m, response in plain["responses"].items()}
    plain["length_scale"] = to_plain(plain["length_scale"])
    plain["priors"] = {name: to_plain(value) for name, value in vars(plain["priors"]).items()}
    plain["run_offsets"] = list(plain["run_offsets"])
    timescales = plain["residual_timescales"]
    plain["residual_timescales"] = None if timescales is None else {m: to_plain(v) for m, v in timescales.items()}
    plain["powers"] = None if plain["powers"] is None else dict(plain["powers"])
    return plain
