"""What commands print: fits, scores, recordings and machines as plain facts (JSON) and as lines for people."""

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from msrm.cli.wording import NUTS_OPTIONS, option
from msrm.gp.storage import DrawStore
from msrm.plain import to_plain
from msrm.recording import Recording

__all__ = [
    "Answer",
    "draws_facts",
    "draws_lines",
    "fit_facts",
    "fit_lines",
    "recording_facts",
    "runtime_lines",
    "score_facts",
    "score_lines",
    "store_facts",
    "store_lines",
]


@dataclass
class Answer:
    """What a command found: plain facts, and the same in lines for people."""

    facts: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    exit_code: int = 0

    def json(self) -> str:
        """One JSON document; numbers that are not finite are null."""
        return json.dumps(_plain(self.facts), indent=2, ensure_ascii=False)

    def text(self) -> str:
        """The lines."""
        return "\n".join(self.lines)


_OPTIONAL = ("log_likelihood", "likelihood_error", "length_scale", "backend", "explained_variance", "penalties")


def fit_facts(fitted: Any) -> dict[str, Any]:
    """What a fit found, plain."""
    extra = {name: getattr(fitted, f"{name}_") for name in _OPTIONAL if hasattr(fitted, f"{name}_")}
    return {
        "model": type(fitted).__name__,
        "objective": float(fitted.objective_),
        "converged": bool(fitted.converged_),
        "stop_reason": str(fitted.stop_reason_),
        "iterations": int(fitted.n_iter_),
        "starts": len(fitted.starts_),
        "at_bounds": _at_bounds(fitted),
        "responses": {
            modality: {person: to_plain(r) for person, r in response.items()}
            if isinstance(response, Mapping)
            else to_plain(response)
            for modality, response in fitted.responses_.items()
        },
        **{
            name: _plain(np.asarray(value) if isinstance(value, xr.DataArray) else value)
            for name, value in extra.items()
        },
    }


def _at_bounds(fitted: Any) -> list[str]:
    """Free response parameters that ended at a bound, to a millionth of its width."""
    found = []
    for modality, response in fitted.responses_.items():
        people = {f"{modality} of {p}": r for p, r in response.items()} if isinstance(response, Mapping) else {}
        for label, own in (people or {modality: response}).items():
            for name, free in fitted.responses[modality].free.items():
                room = min(own.start[name] - free.bounds[0], free.bounds[1] - own.start[name])
                if room <= 1e-6 * (free.bounds[1] - free.bounds[0]):
                    found.append(f"{label}: {name}")
    return found


def fit_lines(facts: Mapping[str, Any]) -> list[str]:
    """A fit in a few lines."""
    state = "converged" if facts["converged"] else f"NOT converged: {facts['stop_reason']}"
    lines = [
        f"{facts['model']}: objective {facts['objective']:.6g}, {state} ({facts['iterations']} iterations, "
        f"best of {facts['starts']} start{'s' if facts['starts'] != 1 else ''})"
    ]
    for modality, table in facts["responses"].items():
        people = {modality: table} if "family" in table else {f"{modality} of {p}": t for p, t in table.items()}
        for label, response in people.items():
            values = [
                f"{k} {v:.3f}" + (" (at its bound)" if f"{label}: {k}" in facts["at_bounds"] else "")
                for k, v in response.items()
                if isinstance(v, float)
            ]
            lines.append(f"  {label}: {response['family']} {', '.join(values)}".rstrip())
    if "likelihood_error" in facts:
        backend, error = facts["backend"], facts["likelihood_error"]
        lines.append(f"  likelihood: {backend['name']}, error {error:.2g} nats ({backend['reason']})")
        lines.append(f"  length scale: {facts['length_scale']:.3g} s")
    if facts.get("penalties"):
        chosen = [f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in facts["penalties"].items()]
        lines.append("  penalties: " + ", ".join(chosen))
    return lines


def draws_facts(draws: Any) -> dict[str, Any]:
    """What draws hold and whether they have converged, plain."""
    found, attrs = draws.summary(), draws.tree.attrs
    table = found.table
    least = np.minimum(table["ess_bulk"].values, table["ess_tail"].values)
    responses = draws.posterior.get("response")
    return {
        "model": repr(draws.model),
        **{name: _plain(attrs[name]) for name in ("sampler", "chains", "warmup", "draws", "seed")},
        "converged": found.converged,
        "verdict": found.verdict,
        "r_hat": float(table["r_hat"].max()),
        "ess": float(least.min()),
        "slowest": str(table["quantity"].values[int(least.argmin())]),
        "responses": {}
        if responses is None
        else {
            str(name): [float(values.mean()), float(values.std())]
            for name, values in zip(responses["parameter"].values, np.moveaxis(responses.values, 2, 0), strict=True)
        },
    }


def draws_lines(facts: Mapping[str, Any]) -> list[str]:
    """Draws in a few lines."""
    lines = [f"{facts['chains']} chains of {facts['draws']} draws ({facts['sampler']}), seed {facts['seed']}"]
    lines += str(facts["verdict"]).splitlines()
    lines += [f"  {name}: {mean:.3f} (sd {sd:.3f})" for name, (mean, sd) in facts["responses"].items()]
    return lines


def store_facts(store: DrawStore) -> dict[str, Any]:
    """What a sampling run has on disk, plain."""
    identity, lasts = store.identity(), store.checkpoints()
    settings = dict(identity["settings"])
    return {
        "path": str(store.folder),
        "recording_digest": identity["data"],
        **{name: settings.pop(name) for name in ("sampler", "chains", "warmup", "seed")},
        "on_disk": [{"warmup": one.warmup, "draws": one.draws} if one else {"warmup": 0, "draws": 0} for one in lasts],
        "running": store.is_running,
        "settings": settings,
        **{name: identity[name] for name in ("start", "versions", "device")},
    }


def store_lines(facts: Mapping[str, Any]) -> list[str]:
    """Draws on disk in a few lines, with the command that goes on."""
    settings, model = facts["settings"], facts["settings"]["model"]
    told = {name: facts[name] for name in ("sampler", "chains", "warmup", "seed")}
    told |= {name: settings[name] for name in NUTS_OPTIONS if name in settings}
    chains = [{"warmup": 0, "draws": 0}] * facts["chains"]
    chains[: len(facts["on_disk"])] = facts["on_disk"]
    words = ["--path", facts["path"], "--resume"]
    words += [word for name, value in told.items() for word in (option(name), str(value))]
    return [
        "draws on disk: " + ", ".join(f"{name} {value}" for name, value in told.items()),
        *(
            f"  chain {number}: warm-up {chain['warmup']} of {facts['warmup']}, {chain['draws']} draws"
            for number, chain in enumerate(chains)
        ),
        f"GPMSRM: {model['n_factors']} factors, responses of {', '.join(model['responses'])}",
        f"recording_digest: {facts['recording_digest']}",
        "made with " + _versions(facts["versions"]),
        *(["sampling is under way, or was killed"] if facts["running"] else []),
        f"go on with: msrm sample FIT RECORDING OUT {shlex.join(words)} --draws N",
    ]


def score_facts(scores: xr.Dataset) -> dict[str, Any]:
    """Scores by stream and predictor, plain."""
    quantities = [str(n) for n, v in scores.data_vars.items() if v.dims == ("stream", "predictor")]
    streams = {
        str(stream): {
            str(predictor): {q: float(scores[q].sel(stream=stream, predictor=predictor)) for q in quantities}
            for predictor in scores["predictor"].values
        }
        for stream in scores["stream"].values
    }
    overall = {
        str(predictor): {
            q: float(scores[f"overall_{q}"].sel(predictor=predictor)) for q in quantities if f"overall_{q}" in scores
        }
        for predictor in scores["predictor"].values
    }
    return {"overall": overall, "streams": streams, **scores.attrs}


def score_lines(scores: xr.Dataset) -> list[str]:
    """R2 of the fit and every baseline, a row for each stream, the best of a row marked."""
    predictors = [str(name) for name in scores["predictor"].values]
    streams = [str(name) for name in scores["stream"].values]
    table = np.vstack([scores["r2"].transpose("stream", "predictor").values, scores["overall_r2"].values])
    width = max(map(len, [*streams, "overall"]))
    lines = ["held-out R2 (* the best; 0 is the training mean)"]
    lines.append(" " * width + "".join(f"{name:>21}" for name in predictors))
    for name, row in zip([*streams, "overall"], table, strict=True):
        best = np.nanmax(row) if np.isfinite(row).any() else np.nan
        cells = [f"{'-' if np.isnan(v) else f'{v:.3f}'}{'*' if v == best else ' '}" for v in row]
        lines.append(name.ljust(width) + "".join(f"{cell:>21}" for cell in cells))
    if scores.attrs.get("notes"):
        lines.append(f"not applicable: {scores.attrs['notes']}")
    return lines


def recording_facts(recording: Recording) -> dict[str, Any]:
    """A recording, plain."""
    return {
        "digest": recording.digest(),
        "participants": list(recording.participants),
        "runs": list(recording.runs),
        "modalities": list(recording.modalities),
        "streams": [
            {
                "stream": f"{s.participant}/{s.run}/{s.modality}",
                "times": s.n_times,
                "features": s.n_features,
                "first": float(s.times[0]),
                "last": float(s.times[-1]),
                "missing": float(s.missing),
            }
            for s in recording.streams()
        ],
    }


def runtime_lines(facts: Mapping[str, Any]) -> list[str]:
    """How an archive was made, in a few lines."""
    blas = ", ".join(f"{b['library']} {b['version']} ({b['threads']} threads)" for b in facts["blas"])
    lines = [
        f"made on {facts['processor']}, {facts['platform']}, Python {facts['python']}",
        "with " + _versions(facts["versions"]),
    ]
    lines.append(f"on {facts['cores']['available']} cores; BLAS {blas}")
    if facts["jax"]:
        lines.append(f"JAX on {facts['jax']['platform']}, {facts['dtype']}")
    for place, state in facts["git"].items():
        if state:
            lines.append(f"git ({place}): {state['commit']}{' with changes' if state['modified'] else ''}")
    return lines


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _plain(value: Any) -> Any:
    """JSON's types only; numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
