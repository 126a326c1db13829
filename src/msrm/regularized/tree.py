"""A fitted R-MSRM as a tree of plain numbers and text, and back: what an archive holds (DESIGN 6).

Everything that prediction uses is stored as it is, float64 to the bit; settings and responses are the plain tables of
:mod:`msrm.plain`.
"""

from dataclasses import asdict
from typing import Any

import numpy as np
import xarray as xr

from msrm.plain import response_from_plain, to_plain
from msrm.regularized.domain import Grid
from msrm.regularized.model import Model, PairModel, RunPaths
from msrm.regularized.search import Start
from msrm.regularized.settings import Settings, checked_settings

_PATHS = ("time", "path", "factor")


def model_tree(model: Model) -> dict[str, xr.Dataset]:
    """The nodes that hold a model."""
    settings = {name: getattr(model.settings, name) for name in Settings.__dataclass_fields__}
    settings["responses"] = {m: to_plain(response) for m, response in model.settings.responses.items()}
    keys = list(model.factors)
    nodes = {
        "/settings": xr.Dataset(attrs=settings),
        "/streams": xr.Dataset(
            {
                name: ("stream", np.array([key[i] for key in keys]))
                for i, name in enumerate(("participant", "run", "modality"))
            }
            | {"factor": ("stream", np.array([model.factors[key] for key in keys]))},
            attrs={"n_participant_runs": model.n_participant_runs, "system_weight": model.system_weight},
        ),
    }
    for (participant, modality), pair in model.pairs.items():
        where = f"{participant}/{modality}"
        features = {"feature": pair.features}
        nodes[f"/parameters/loading/{where}"] = xr.Dataset(
            {"value": (("feature", "factor"), pair.loading)},
            features | {"factor": np.arange(1, pair.loading.shape[1] + 1)},
            attrs={
                "response": to_plain(pair.response),
                "residual_variance": pair.residual_variance,
                "ridge": model.ridges.get((participant, modality), np.nan),
            },
        )
        nodes[f"/parameters/offset/{where}"] = xr.Dataset({"value": ("feature", pair.mean)}, features)
        nodes[f"/parameters/scale/{where}"] = xr.Dataset({"value": ("feature", pair.sd)}, features)
    for run, paths in model.runs.items():
        nodes[f"/latent/{run}"] = xr.Dataset(
            {"path": (_PATHS, paths.paths)},
            {"time": ("time", paths.grid.times, {"units": "s"})},
            attrs={"participants": list(paths.participants), "start": paths.grid.start, "step": paths.grid.step}
            | {"limits": np.array(paths.limits)},
        )
    return nodes


def plain_number(value: Any) -> Any:
    """A NumPy number as Python's own; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def node(tree: xr.DataTree, path: str) -> xr.Dataset:
    """The variables and attributes of one node."""
    found = tree[path]
    assert isinstance(found, xr.DataTree)
    return found.to_dataset(inherit=False)


def model_from_tree(tree: xr.DataTree) -> Model:
    """The model of a tree made by :func:`model_tree`."""
    plain = {str(name): plain_number(value) for name, value in tree["settings"].attrs.items()}
    plain["responses"] = {m: response_from_plain(t, f"responses.{m}") for m, t in plain["responses"].items()}
    streams = node(tree, "streams")
    names = [[str(name) for name in streams[kind].values] for kind in ("participant", "run", "modality")]
    pairs, ridges = {}, {}
    for participant, group in tree["parameters"]["loading"].children.items():
        for modality in group.children:
            pair, data = (participant, modality), node(tree, f"parameters/loading/{participant}/{modality}")
            where = f"{participant}/{modality}"
            pairs[pair] = PairModel(
                data["feature"].values.astype(str),
                data["value"].values,
                node(tree, f"parameters/offset/{where}")["value"].values,
                node(tree, f"parameters/scale/{where}")["value"].values,
                response_from_plain(data.attrs["response"], f"responses.{where}"),
                float(data.attrs["residual_variance"]),
            )
            if np.isfinite(data.attrs["ridge"]):
                ridges[pair] = float(data.attrs["ridge"])
    runs = {}
    for run in tree["latent"].children:
        data = node(tree, f"latent/{run}")
        paths = data["path"].transpose(*_PATHS).values
        grid = Grid(float(data.attrs["start"]), float(data.attrs["step"]), len(paths))
        first, last = np.asarray(data.attrs["limits"]).tolist()
        runs[run] = RunPaths(tuple(data.attrs["participants"]), grid, (first, last), paths)
    factors = dict(zip(zip(*names, strict=True), streams["factor"].values.tolist(), strict=True))
    attrs = streams.attrs
    return Model(
        checked_settings(plain),
        pairs,
        runs,
        factors,
        int(attrs["n_participant_runs"]),
        float(attrs["system_weight"]),
        ridges,
    )


def starts_tree(starts: tuple[Start, ...]) -> dict[str, xr.Dataset]:
    """The nodes that hold the evidence of all starts."""
    nodes: dict[str, xr.Dataset] = {}
    for number, start in enumerate(starts):
        facts = {name: value for name, value in asdict(start).items() if name != "objectives"}
        nodes[f"/starts/{number}"] = xr.Dataset({"objectives": ("iteration", start.objectives)}, attrs=facts)
    return nodes


def starts_from_tree(tree: xr.DataTree) -> tuple[Start, ...]:
    """The starts of a tree made by :func:`starts_tree`."""
    out = []
    for number in sorted(tree["starts"].children, key=int):
        data = node(tree, f"starts/{number}")
        facts: dict[str, Any] = dict(data.attrs)
        facts |= {"converged": bool(facts["converged"]), "n_evaluations": int(facts["n_evaluations"])}
        out.append(Start(objectives=data["objectives"].values, **facts))
    return tuple(out)
