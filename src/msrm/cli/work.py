"""What each command does: compute, save, and say what was found as text and as plain data."""

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from msrm import __version__, archive
from msrm.cli.inputs import check_out, open_any, open_fitted, regular_times, targets_of, training_of, unfitted
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
    store_facts,
    store_lines,
)
from msrm.evaluation import evaluate as evaluate_estimator
from msrm.evaluation import score
from msrm.gp.estimator import GPMSRM
from msrm.gp.sampling import checked_options, draw_folder
from msrm.gp.storage import DrawStore
from msrm.plain import to_plain
from msrm.recording import Recording
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
    for written in (out, truth):
        if written is not None:
            check_out(written)
    recording, made_by = simulate_recording(**options)
    recording.to_netcdf(out)
    if truth is not None:
        archive.write_tree(_truth_tree(made_by, recording), truth, kind="Truth")
    facts = {"recording": str(out), "truth": None if truth is None else str(truth), "digest": recording.digest()}
    return Answer(facts, [str(recording), f"saved {out}" + (f" and {truth}" if truth else "")])


def fit(
    path: Path,
    out: Path,
    config: Path | None,
    assignments: Sequence[str] | None,
    flags: Mapping[str, Any],
    selection: Mapping[str, Any],
) -> Answer:
    """Fit and save; an interrupted fit never replaces a finished one."""
    check_out(out, path, config)
    estimator, recording = unfitted(config, assignments, flags, path, selection)
    start = time.perf_counter()
    fitted = estimator.fit(recording)
    seconds = time.perf_counter() - start
    if _interrupted(fitted) and out.exists():
        out = out.with_name(f"{out.stem}.interrupted{out.suffix}")
    fitted.save(out)
    facts = {"archive": str(out), "seconds": seconds, **fit_facts(fitted)}
    lines = [*fit_lines(facts), f"fitted in {seconds:.2f} s, saved {out}"]
    return Answer(facts, lines, exit_code=130 if _interrupted(fitted) else 0)


def _interrupted(fitted: Any) -> bool:
    """Whether Ctrl-C ended the search."""
    return "interrupted" in fitted.stop_reason_


def sample(
    model: Path,
    path: Path,
    out: Path,
    assignments: Sequence[str] | None,
    options: Mapping[str, Any],
    selection: Mapping[str, Any],
) -> Answer:
    """Draw from the posterior of a fit, or of a fit made first, and save; draws on disk go once they are saved."""
    check_out(out, path, model)
    settings = _checked_sampling(options)
    if not model.exists():
        raise FileNotFoundError(f"{model}: no such fit, nor settings to make one from")
    start = time.perf_counter()
    if model.is_dir() or (model.is_file() and is_sealed(model)):
        if assignments:
            raise ValueError(f"{model} is a fit, whose settings are made; leave out --set, or give settings instead")
        fitted, recording = open_fitted(model), open_any(path, selection)
        if not isinstance(fitted, GPMSRM):
            raise ValueError(f"{model} holds {type(fitted).__name__}; only a GPMSRM fit can be sampled")
    else:
        estimator, recording = unfitted(model, assignments, {"model": "GPMSRM"}, path, selection)
        fitted = estimator.fit(recording)
        if _interrupted(fitted):
            raise KeyboardInterrupt("interrupted in the fit before the first draw")
    with draw_folder(options["path"]) as folder:
        draws = fitted.sample(recording, **settings | {"path": folder})
        draws.save(out)
    seconds = time.perf_counter() - start
    facts = {"archive": str(out), "seconds": seconds, **draws_facts(draws)}
    return Answer(facts, [*draws_lines(facts), f"sampled in {seconds:.1f} s, saved {out}"])


def _checked_sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `GPMSRM.sample` that were given, refused before a fit takes its time."""
    given = {name: value for name, value in options.items() if value is not None}
    counts = {name: given[name] for name in ("chains", "warmup", "draws", "seed")}
    settings = {name: given[name] for name in given if name not in (*counts, "sampler", "path", "resume", "n_jobs")}
    checked_options(given["sampler"], counts, settings, path=options["path"], resume=given["resume"])
    if "n_jobs" in given and given["sampler"] == "nuts" and settings.get("chain_method") != "processes":
        raise ValueError("--jobs: NUTS starts processes under --chain-method processes alone")
    return given


def predict(
    fit_path: Path,
    path: Path,
    out: Path,
    targets: Sequence[str] | None,
    options: Mapping[str, Any],
    selection: Mapping[str, Any],
) -> Answer:
    """Predict and save."""
    check_out(out, path, fit_path)
    fitted, recording = open_fitted(fit_path), open_any(path, selection)
    every, extra = options["every"], {"noise": True} if options["noise"] else {}
    if extra and "noise" not in inspect.signature(fitted.predict).parameters:
        raise ValueError(f"--noise: {fit_path} is an {type(fitted).__name__}, whose predictions have no variances")
    times = None if every is None else regular_times(recording, every)
    predicted = fitted.predict(recording, targets=targets_of(targets), source=options["source"], times=times, **extra)
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
        check_out(out, path, config, made["path"])
    wanted, seed = targets_of(targets), options.pop("seed")
    if made["path"] is not None:
        if config is not None or assignments:
            raise ValueError("--fit scores a fit as it is; leave out --config and --set")
        fitted, recording = open_fitted(made["path"]), open_any(path, selection)
        training = training_of(fitted, made)
        scores = score(
            fitted, recording, training=training, targets=wanted, source=options["source"] or "both", seed=seed or 0
        )
    else:
        estimator, recording = unfitted(config, assignments, {"seed": seed}, path, selection)
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
    check_out(out, path, recording_path)
    import_module("matplotlib").use("Agg")
    _check_format(out)
    plots = import_module("msrm.plots")
    if what == "prediction":
        if recording_path is None:
            raise ValueError("--what prediction needs --recording")
        axes = _plot_prediction(plots, path, open_any(recording_path, {} if task is None else {"task": task}), choice)
    else:
        recording = None
        if recording_path is not None:
            recording = open_any(recording_path, {} if task is None else {"task": task})
        axes = _plot_fit(plots, open_fitted(path), what, recording, choice)
    figure = np.ravel(np.asarray(axes, dtype=object))[0].figure
    figure.savefig(out, dpi=dpi)
    return Answer({"picture": str(out), "what": what}, [f"saved {out}"])


def _check_format(out: Path) -> None:
    """Refuse an ending that no picture has."""
    known = import_module("matplotlib.backend_bases").FigureCanvasBase.get_supported_filetypes()
    if out.suffix.lower().removeprefix(".") not in known:
        raise ValueError(f"{out}: end its name in .png, .pdf or .svg (or {', '.join(sorted(known))})")


def info(path: Path, task: str | None) -> Answer:
    """What a file or folder holds."""
    if DrawStore(path).is_used:
        found = store_facts(DrawStore(path))
        return Answer(found, store_lines(found))
    if path.is_dir() or not path.exists() or not is_sealed(path) or _kind_of(path) == "recording":
        recording = open_any(path, {} if task is None else {"task": task})
        return Answer(recording_facts(recording), [str(recording), f"digest {recording.digest()}"])
    tree = archive.read_tree(path)
    attributes = {str(name): value for name, value in tree.attrs.items()}
    kind = attributes["kind"]
    facts: dict[str, Any] = {"path": str(path), **attributes, "runtime": dict(tree["runtime"].attrs)}
    lines = [f"{name}: {attributes[name]}" for name in _ORIGIN if name in attributes]
    try:
        fitted = open_fitted(path)
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
