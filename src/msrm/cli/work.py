"""What each command does: open, compute, save, and say what was found as text and as plain data."""

import inspect
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from msrm import __version__, archive
from msrm.bids import read_bids
from msrm.cli.report import (
    Answer,
    draws_facts,
    draws_lines,
    fit_facts,
    fit_lines,
    recording_facts,
    runtime_lines,
    score_facts,
    score_lines,
)
from msrm.cli.settings import estimator_of, read_settings
from msrm.evaluation import evaluate as evaluate_estimator
from msrm.evaluation import score
from msrm.plain import to_plain
from msrm.recording import Recording, open_recording
from msrm.runtime import guard
from msrm.runtime.doctor import diagnose
from msrm.runtime.facts import describe
from msrm.sealed import is_sealed
from msrm.simulation import Truth
from msrm.simulation import simulate as simulate_recording

__all__ = ["Answer", "doctor", "evaluate", "fit", "info", "open_any", "plot", "predict", "sample", "simulate"]

_ORIGIN = ("kind", "msrm_version", "created", "recording_digest", "fit", "source")
_MARKS = {"ok": "ok  ", "warning": "WARN", "error": "FAIL"}


def simulate(out: Path, truth: Path | None, options: dict[str, Any]) -> Answer:
    """Write a simulated recording, and its truth when asked."""
    recording, made_by = simulate_recording(**options)
    recording.to_netcdf(out)
    if truth is not None:
        archive.write_tree(_truth_tree(made_by, recording), truth, kind="Truth")
    facts = {"recording": str(out), "truth": None if truth is None else str(truth), "digest": recording.digest()}
    return Answer(facts, [str(recording), f"saved {out}" + (f" and {truth}" if truth else "")])


def _spare_inputs(out: Path, *inputs: Path | None) -> None:
    """Refuse to write over what is read."""
    for given in inputs:
        if given is not None and out.resolve() == Path(given).resolve():
            raise ValueError(f"{out} is an input; give OUT another name")


def fit(
    path: Path,
    out: Path,
    config: Path | None,
    assignments: Sequence[str] | None,
    flags: Mapping[str, Any],
    selection: Mapping[str, Any],
) -> Answer:
    """Fit and save; an interrupted fit never replaces a finished one."""
    _spare_inputs(out, path, config)
    settings, part = read_settings(config, assignments, flags)
    estimator = estimator_of(settings)
    recording = open_any(path, {**part, **selection})
    guard()
    start = time.perf_counter()
    fitted = estimator.fit(recording)
    seconds = time.perf_counter() - start
    interrupted = "interrupted" in fitted.stop_reason_
    if interrupted and out.exists():
        out = out.with_name(f"{out.stem}.interrupted{out.suffix}")
    fitted.save(out)
    facts = {"archive": str(out), "seconds": seconds, **fit_facts(fitted)}
    lines = [*fit_lines(facts), f"fitted in {seconds:.2f} s, saved {out}"]
    return Answer(facts, lines, exit_code=130 if interrupted else 0)


def sample(
    model: Path,
    path: Path,
    out: Path,
    assignments: Sequence[str] | None,
    options: Mapping[str, Any],
    selection: Mapping[str, Any],
) -> Answer:
    """Draw from the posterior of a fit, or of a fit made first, and save."""
    _spare_inputs(out, path, model)
    start = time.perf_counter()
    if model.is_file() and is_sealed(model):
        if assignments:
            raise ValueError(f"{model} is a fit, whose settings are made; leave out --set, or give settings instead")
        fitted = archive.open_fit(model)
        if not hasattr(fitted, "sample"):
            raise ValueError(f"{model} holds {type(fitted).__name__}; only a GPMSRM fit can be sampled")
        recording = open_any(path, selection)
    else:
        settings, part = read_settings(model, assignments, {"model": "GPMSRM"})
        recording = open_any(path, {**part, **selection})
        guard()
        fitted = estimator_of(settings).fit(recording)
    draws = fitted.sample(recording, **options)
    draws.save(out)
    seconds = time.perf_counter() - start
    facts = {"archive": str(out), "seconds": seconds, **draws_facts(draws)}
    return Answer(facts, [*draws_lines(facts), f"sampled in {seconds:.1f} s, saved {out}"])


def predict(
    fit_path: Path,
    path: Path,
    out: Path,
    targets: Sequence[str] | None,
    options: Mapping[str, Any],
    selection: Mapping[str, Any],
) -> Answer:
    """Predict and save."""
    _spare_inputs(out, path, fit_path)
    fitted, recording = archive.open_fit(fit_path), open_any(path, selection)
    every, extra = options["every"], {"noise": True} if options["noise"] else {}
    if extra and "noise" not in inspect.signature(fitted.predict).parameters:
        raise ValueError(f"--noise: {fit_path} is an {type(fitted).__name__}, whose predictions have no variances")
    times = None if every is None else _regular_times(recording, every)
    predicted = fitted.predict(recording, targets=_targets(targets), source=options["source"], times=times, **extra)
    predicted.attrs |= {"source": options["source"], "fit": fit_path.name, "recording_digest": recording.digest()}
    archive.write_tree(predicted, out, kind="Prediction")
    rows = []
    for node in predicted.leaves:
        data = node.to_dataset()
        supported = float(data["supported"].mean())
        rows.append({"stream": node.path.lstrip("/"), **dict(data["mean"].sizes), "supported": supported})
    lines = [f"{r['stream']}: {r['time']} x {r['feature']}, {r['supported']:.0%} of times supported" for r in rows]
    return Answer({"predictions": str(out), "streams": rows}, [*lines, f"saved {out}"])


def evaluate(
    path: Path,
    made: Mapping[str, Any],
    config: Path | None,
    assignments: Sequence[str] | None,
    targets: Sequence[str] | None,
    options: dict[str, Any],
    out: Path | None,
    selection: Mapping[str, Any],
) -> Answer:
    """Score held-out predictions, of copies of an estimator or of a fit: `made` is its path, training and runs."""
    if out is not None:
        _spare_inputs(out, path, config, made["path"])
    wanted, seed = _targets(targets), options.pop("seed")
    if made["path"] is not None:
        if config is not None or assignments:
            raise ValueError("--fit scores a fit as it is; leave out --config and --set")
        fitted, recording = archive.open_fit(made["path"]), open_any(path, selection)
        training = _training(fitted, made)
        scores = score(
            fitted, recording, training=training, targets=wanted, source=options["source"] or "both", seed=seed or 0
        )
    else:
        settings, part = read_settings(config, assignments, {"seed": seed})
        estimator, recording = estimator_of(settings), open_any(path, {**part, **selection})
        guard()
        scores = evaluate_estimator(estimator, recording, targets=wanted, seed=seed or 0, **options)
    if out is not None:
        archive.write_tree(xr.DataTree(scores.assign_attrs(recording_digest=recording.digest())), out, kind="Scores")
    return Answer(score_facts(scores), score_lines(scores))


def plot(
    path: Path,
    out: Path,
    what: str,
    recording_path: Path | None,
    task: str | None,
    choice: Mapping[str, Any],
    dpi: int,
) -> Answer:
    """Draw and save one picture."""
    _spare_inputs(out, path, recording_path)
    import_module("matplotlib").use("Agg")
    plots = import_module("msrm.plots")
    if what == "prediction":
        if recording_path is None:
            raise ValueError("--what prediction needs --recording")
        axes = _plot_prediction(plots, path, open_any(recording_path, {} if task is None else {"task": task}), choice)
    else:
        recording = None
        if recording_path is not None:
            recording = open_any(recording_path, {} if task is None else {"task": task})
        axes = _plot_fit(plots, archive.open_fit(path), what, recording, choice)
    figure = np.ravel(np.asarray(axes, dtype=object))[0].figure
    figure.savefig(out, dpi=dpi)
    return Answer({"picture": str(out), "what": what}, [f"saved {out}"])


def info(path: Path, task: str | None) -> Answer:
    """What a file holds."""
    if path.is_dir() or not path.exists() or not is_sealed(path) or _kind_of(path) == "recording":
        recording = open_any(path, {} if task is None else {"task": task})
        return Answer(recording_facts(recording), [str(recording), f"digest {recording.digest()}"])
    tree = archive.read_tree(path)
    attributes = {str(name): value for name, value in tree.attrs.items()}
    kind = attributes["kind"]
    facts: dict[str, Any] = {"path": str(path), **attributes, "runtime": dict(tree["runtime"].attrs)}
    lines = [f"{name}: {attributes[name]}" for name in _ORIGIN if name in attributes]
    try:
        fitted = archive.open_fit(path)
    except ValueError:
        lines += [str(node.path) for node in tree.leaves if node.name != "runtime"]
    else:
        facts |= {"draws": draws_facts(fitted)} if kind == "Draws" else {}
        lines += draws_lines(facts["draws"]) if kind == "Draws" else []
        facts["fit"] = fit_facts(getattr(fitted, "model", fitted))
        lines += fit_lines(facts["fit"])
    return Answer(facts, [*lines, *runtime_lines(facts["runtime"])])


def doctor(probe: bool) -> Answer:
    """Look at the machine."""
    found = diagnose(probe=probe)
    lines = []
    for finding in found:
        lines.append(f"{_MARKS[finding.level]}  {finding.topic}: {finding.found}")
        if finding.line:
            lines.append(f"      {finding.line}")
    worst = any(finding.level == "error" for finding in found)
    facts = {"msrm": __version__, "findings": [asdict(finding) for finding in found], "machine": describe()}
    return Answer(facts, lines, exit_code=int(worst))


def open_any(path: Path | None, selection: Mapping[str, Any]) -> Recording:
    """The recording of a .nc file or, with a task, of a BIDS folder; the part of it that `selection` names.

    Raises
    ------
    FileNotFoundError, ValueError
        When nothing is there, a folder has no task, or a name is not in the recording.
    """
    if path is None or not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    names = ("participants", "runs", "modalities")
    part = {name: value for name, value in selection.items() if name in names and value is not None}
    rest = {name: value for name, value in selection.items() if name not in names}
    if path.is_dir():
        if "task" not in rest:
            raise ValueError(f"{path} is a folder: name the BIDS task to read with --task")
        recording = read_bids(path, **rest)
    elif rest:
        raise ValueError(f"{path} is no BIDS folder: {next(iter(rest))!r} cannot be chosen in it")
    else:
        recording = open_recording(path)
    return recording.select(**part) if part else recording


def _targets(given: Sequence[str] | None) -> dict[str, list[str]] | None:
    """{participant: [modality]} of PARTICIPANT/MODALITY words."""
    if not given:
        return None
    targets: dict[str, list[str]] = {}
    for word in given:
        participant, slash, modality = word.partition("/")
        if not slash or not participant or not modality:
            raise ValueError(f"--target {word}: wanted PARTICIPANT/MODALITY, such as p1/rating")
        targets.setdefault(participant, []).append(modality)
    return targets


def _training(fitted: Any, made: Mapping[str, Any]) -> Recording:
    """The recording that a fit was made from, recognized by its digest."""
    if made["training"] is None:
        raise ValueError(
            "--fit needs --training, the recording that the fit was made from; the baselines learn from it"
        )
    training = open_any(made["training"], {"runs": made["runs"]} if made["runs"] else {})
    if training.digest() != fitted.recording_digest_:
        raise ValueError(
            f"{made['training']} is not what {made['path']} was fitted to (runs {', '.join(training.runs)}); "
            "name its runs with --training-run"
        )
    return training


def _regular_times(recording: Recording, every: float) -> dict[str, np.ndarray]:
    """{run: times} every so many seconds over what was recorded."""
    if not every > 0:
        raise ValueError(f"--every must be above 0 seconds, found {every:g}")
    spans = {r: [s.times for s in recording.streams(run=r)] for r in recording.runs}
    limits = {r: (min(t[0] for t in times), max(t[-1] for t in times)) for r, times in spans.items()}
    return {
        r: low + every * np.arange(math.floor((high - low) / every + 1e-9) + 1) for r, (low, high) in limits.items()
    }


def _truth_tree(truth: Truth, recording: Recording) -> xr.DataTree:
    """A simulation's truth as an archive's tree."""
    groups: dict[str, xr.Dataset] = {f"/latent/{run}": xr.Dataset({"mean": path}) for run, path in truth.latent.items()}
    for path, value in truth.parameters.items():
        array = np.asarray(value, dtype=float)
        groups[f"/parameters/{path}"] = xr.Dataset({"value": (("feature", "factor")[: array.ndim], array)})
    groups["/responses"] = xr.Dataset(attrs={m: to_plain(r) for m, r in truth.responses.items()})
    tree = xr.DataTree.from_dict(groups)
    tree.attrs["recording_digest"] = recording.digest()
    return tree


def _plot_prediction(plots: Any, path: Path, recording: Recording, choice: Mapping[str, Any]) -> Any:
    """Observed and predicted of one stream of a prediction archive."""
    tree = archive.read_tree(path)
    if tree.attrs["kind"] != "Prediction":
        raise ValueError(f"{path} holds a {tree.attrs['kind']}, not predictions; make them with msrm predict")
    streams = [node.path.strip("/").split("/") for node in tree.leaves if node.name != "runtime"]
    people, runs, modality = choice["participants"] or [], choice["runs"] or [], choice["modality"]
    fitting = [
        (p, r, m)
        for p, r, m in streams
        if (not people or p in people) and (not runs or r in runs) and modality in (None, m)
    ]
    if not fitting:
        raise ValueError(f"{path} predicts none of these; it has {', '.join('/'.join(s) for s in streams)}")
    participant, run, modality = fitting[0]
    predicted = tree[f"{participant}/{run}/{modality}"].to_dataset()
    axes = plots.observed_predicted(
        recording.stream(participant, run, modality).data, predicted, features=choice["features"]
    )
    np.ravel(axes)[0].figure.suptitle(f"{modality} of {participant} in {run}", fontsize="medium")
    return axes


def _plot_fit(plots: Any, fitted: Any, what: str, recording: Recording | None, choice: Mapping[str, Any]) -> Any:
    """A picture of a fit or of draws."""
    if what in ("traces", "ranks", "check") and not hasattr(fitted, "ensemble"):
        raise ValueError(f"--what {what} needs draws; make them with msrm sample")
    if what == "responses":
        return plots.responses(fitted)
    if what == "loadings":
        return plots.loadings(fitted, modality=choice["modality"], participants=choice["participants"])
    if what == "convergence":
        return plots.convergence(getattr(fitted, "model", fitted))
    if what in ("traces", "ranks"):
        return getattr(plots, what)(fitted, choice["quantities"])
    if what == "check":
        if recording is None:
            raise ValueError("--what check needs --recording")
        return plots.predictive_check(fitted.predictive_check(recording))
    if recording is not None:
        return plots.latents(fitted.infer_latent(recording), runs=choice["runs"])
    latent = fitted.latents_ if hasattr(fitted, "latents_") else fitted.infer_latent()
    return plots.latents(latent, runs=choice["runs"])


def _kind_of(path: Path) -> str | None:
    """The kind that a sealed file says it holds."""
    with xr.open_dataset(path, engine="netcdf4") as root:
        return root.attrs.get("kind")
