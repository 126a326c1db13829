"""The command line (DESIGN 9): every command, its options and its help. What a command does is in `msrm.cli.work`.

Nothing heavy is imported here, so that ``--help`` answers at once. Exit codes: 0 done, 1 a problem told in one line
on standard error, 2 a malformed command line, 130 ended by Ctrl-C. ``--json`` prints one JSON document on standard
output and nothing else there.
"""

import os
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from msrm import __version__
from msrm.cli.options import (
    ChainMethod,
    Config,
    FitPath,
    HoldOut,
    Json,
    Metric,
    Modalities,
    ModelName,
    Participants,
    Picture,
    RecordingPath,
    Runs,
    Sampler,
    Seed,
    Set,
    Source,
    Targets,
    Task,
)
from msrm.cli.wording import as_typed

__all__ = ["app", "main"]


class _Group(TyperGroup):
    """The commands; what was typed is kept, for messages that name it."""

    words: ClassVar[list[str]] = []

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _Group.words = list(args)
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="msrm",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Multimodal shared response models: several people, one stimulus, several streams, one latent response.",
    epilog="Exit codes: 0 done, 1 a problem (one line on standard error), 2 a malformed command line, 130 Ctrl-C. "
    "MSRM_TRACEBACK=1 shows where a problem arose.",
)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"msrm {__version__}")
        raise typer.Exit


@app.command(rich_help_panel="Data")
def simulate(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The recording to write (.nc).")],
    truth: Annotated[Path | None, typer.Option(help="Also write what made it: parameters and latent.")] = None,
    features: Annotated[int | None, typer.Option(help="Brain features; 360 by default.")] = None,
    factors: Annotated[int, typer.Option(help="Latent factors.")] = 3,
    runs: Annotated[int, typer.Option(help="Runs.")] = 1,
    seconds: Annotated[float, typer.Option(help="Length of a run.")] = 453.6,
    participants: Annotated[int, typer.Option(help="Participants.")] = 5,
    missing: Annotated[float, typer.Option(help="Share of missing entries, 0 to 1.")] = 0.0,
    gaps: Annotated[int, typer.Option(help="Stretches without data in each stream.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bits.")] = 0,
    json: Json = False,
) -> None:
    """Make a recording whose truth is known: brain, ratings and physiology of several people.

    [bold]Example[/bold]: msrm simulate rec.nc --features 40 --participants 3 --runs 2 --truth truth.nc
    """
    options = {"features": features, "factors": factors, "runs": runs, "seconds": seconds}
    options |= {"participants": participants, "missing": missing, "gaps": gaps, "seed": seed}
    _do("simulate", json, out, truth, options)


@app.command(rich_help_panel="Models")
def fit(
    recording: RecordingPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The fit archive to write (.nc).")],
    config: Config = None,
    settings: Set = None,
    model: ModelName = None,
    factors: Annotated[int | None, typer.Option("--factors", "-k", help="Latent factors (n_factors).")] = None,
    latent_step: Annotated[float | None, typer.Option(help="R-MSRM: latent grid step in seconds.")] = None,
    penalties: Annotated[
        str | None, typer.Option(help="R-MSRM: given, or cv to choose them by cross-validation.")
    ] = None,
    n_init: Annotated[int | None, typer.Option(help="R-MSRM: starts.")] = None,
    n_jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="R-MSRM: processes for starts and folds.")] = None,
    seed: Seed = None,
    task: Task = None,
    participant: Participants = None,
    run: Runs = None,
    modality: Modalities = None,
    json: Json = False,
) -> None:
    """Fit R-MSRM or GP-MSRM to a recording and save the fit.

    Settings come from a TOML file, then --set, then the options below; unknown names are refused.

    [bold]fit.toml[/bold]

        n_factors = 3
        latent_step = 0.9

        \\[responses.brain]
        family = "Identity"

        \\[responses.rating]
        family = "Gaussian"
        width = 0.6
        lag = {start = 0.0, bounds = \\[-1.5, 1.5]}

        \\[recording]
        runs = \\["run-1", "run-2"]

    [bold]Examples[/bold]

        msrm fit rec.nc fit.nc --config fit.toml
        msrm fit bids/ fit.nc -c fit.toml --task movie --penalties cv -j 4
        msrm fit rec.nc fit.nc -c fit.toml -s loading_ridge=1e-2 -s responses.rating.width=0.8
        msrm fit rec.nc gp.nc -c gp.toml --model GPMSRM -s length_scale=4.0
    """
    flags = {"n_factors": factors, "latent_step": latent_step, "penalties": penalties}
    flags |= {"n_init": n_init, "n_jobs": n_jobs, "seed": seed, "model": model}
    _do("fit", json, recording, out, config, settings, flags, _selection(task, participant, run, modality))


@app.command(rich_help_panel="Models")
def sample(
    model: Annotated[
        Path, typer.Argument(metavar="FIT", help="A GP-MSRM fit of RECORDING, or settings (TOML) to fit first.")
    ],
    recording: RecordingPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The draws to write (.nc).")],
    settings: Set = None,
    sampler: Annotated[Sampler, typer.Option(help="How to draw.")] = "gibbs",
    chains: Annotated[int, typer.Option(help="Chains.")] = 4,
    warmup: Annotated[int, typer.Option(help="Sweeps (NUTS: draws) that tune each chain; not kept.")] = 1000,
    draws: Annotated[int, typer.Option(help="Draws kept of each chain.")] = 1000,
    path: Annotated[
        Path | None, typer.Option(help="Folder for the blocks of draws, so that a kill loses little.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run of --path; with more --draws, extend it.")
    ] = False,
    n_jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="Processes; one a chain by default.")] = None,
    metric: Annotated[
        Metric | None, typer.Option(help="NUTS: of its coordinates; diagonal by default.", show_default=False)
    ] = None,
    chain_method: Annotated[
        ChainMethod | None, typer.Option(help="NUTS: one by one (the default), in step, or a process each.")
    ] = None,
    target_accept: Annotated[
        float | None, typer.Option(help="NUTS: acceptance that warm-up aims at; 0.8 by default.")
    ] = None,
    max_tree_depth: Annotated[
        int | None, typer.Option(help="NUTS: at most 2 to this power leapfrog steps a draw; 10 by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    task: Task = None,
    participant: Participants = None,
    run: Runs = None,
    modality: Modalities = None,
    json: Json = False,
) -> None:
    """Draw from the posterior of a GP-MSRM and save the draws, its MAP with them.

    Ctrl-C keeps what was drawn in --path; the same command with --resume goes on.

    [bold]Examples[/bold]

        msrm sample gp.nc rec.nc draws.nc --path blocks
        msrm sample gp.nc rec.nc draws.nc --path blocks --resume --draws 4000
        msrm sample gp.toml rec.nc draws.nc -s n_factors=2 --run run-1
        msrm sample gp.nc rec.nc draws.nc --sampler nuts --warmup 300 --draws 500 --chain-method processes
    """
    options: dict[str, Any] = {"sampler": sampler, "chains": chains, "warmup": warmup, "draws": draws, "seed": seed}
    options |= {"path": path, "resume": resume, "n_jobs": n_jobs, "metric": metric, "chain_method": chain_method}
    options |= {"target_accept": target_accept, "max_tree_depth": max_tree_depth}
    _do("sample", json, model, recording, out, settings, options, _selection(task, participant, run, modality))


@app.command(rich_help_panel="Models")
def predict(
    fitted: FitPath,
    recording: RecordingPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The predictions to write (.nc).")],
    target: Targets = None,
    source: Annotated[Source, typer.Option(help="Predict from the target's participant, the others, or all.")] = "both",
    noise: Annotated[
        bool, typer.Option("--noise", help="GP-MSRM: variances of new measurements, noise included.")
    ] = False,
    every: Annotated[
        float | None, typer.Option(help="Predict every so many seconds, not at the recorded times.")
    ] = None,
    task: Task = None,
    participant: Participants = None,
    run: Runs = None,
    modality: Modalities = None,
    json: Json = False,
) -> None:
    """Predict streams of a recording from its other streams, with a saved fit.

    The named targets are removed before anything is computed.

    [bold]Example[/bold]: msrm predict fit.nc rec.nc out.nc -t p1/rating --source across
    """
    part = _selection(task, participant, run, modality)
    options = {"source": source, "every": every, "noise": noise}
    _do("predict", json, fitted, recording, out, target, options, part)


@app.command(rich_help_panel="Models")
def evaluate(
    recording: RecordingPath,
    fitted: Annotated[
        Path | None, typer.Option("--fit", help="Score this fit instead of fitting; RECORDING was not used in it.")
    ] = None,
    training: Annotated[
        Path | None, typer.Option(help="With --fit: the recording that the fit was made from, for the baselines.")
    ] = None,
    training_run: Annotated[
        list[str] | None, typer.Option("--training-run", help="The runs that the fit used. Repeatable.")
    ] = None,
    config: Config = None,
    settings: Set = None,
    hold_out: Annotated[HoldOut, typer.Option(help="What each fold leaves out.")] = "runs",
    folds: Annotated[
        int | None, typer.Option(help="Folds; by default one for each run or participant, 5 blocks.")
    ] = None,
    target: Targets = None,
    source: Annotated[
        Source | None, typer.Option(help="Predict from the target's participant, the others, or all.")
    ] = None,
    n_jobs: Annotated[int, typer.Option("--jobs", "-j", help="Processes for folds; -1 for every usable core.")] = 1,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write the scores (.nc).")] = None,
    task: Task = None,
    participant: Participants = None,
    run: Runs = None,
    modality: Modalities = None,
    json: Json = False,
) -> None:
    """Score held-out predictions beside baselines that do nothing clever.

    R2 is 1 - SSE / SSE(training mean): 0 is no better than the mean. The baselines are the training mean, linear
    interpolation, the mean over other participants and a ridge regression from the same sources.

    [bold]Examples[/bold]

        msrm evaluate rec.nc -c fit.toml --hold-out runs
        msrm evaluate rec.nc -c fit.toml --hold-out participants -t p1/rating --json
        msrm evaluate rec.nc --fit fit.nc --run run-3 --training rec.nc --training-run run-1 --training-run run-2
    """
    options = {"hold_out": hold_out, "folds": folds, "source": source, "n_jobs": n_jobs, "seed": seed}
    part = _selection(task, participant, run, modality)
    fit_made = {"path": fitted, "training": training, "runs": training_run}
    _do("evaluate", json, recording, fit_made, config, settings, target, options, out, part)


@app.command(rich_help_panel="Looking")
def plot(
    archive: Annotated[Path, typer.Argument(metavar="FIT", help="A fit, or for `--what prediction` predictions.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The picture to write: .png, .pdf or .svg.")],
    what: Annotated[Picture, typer.Option(help="What to draw.")] = "responses",
    recording: Annotated[
        Path | None, typer.Option(help="The recording; latents: of this one, with data support, not of the fit itself.")
    ] = None,
    participant: Annotated[list[str] | None, typer.Option("--participant", help="Draw these only.")] = None,
    run: Annotated[list[str] | None, typer.Option("--run", help="Draw these only.")] = None,
    modality: Annotated[str | None, typer.Option("--modality", help="Draw this one.")] = None,
    feature: Annotated[list[str] | None, typer.Option("--feature", help="Predictions: draw these only.")] = None,
    quantity: Annotated[
        list[str] | None, typer.Option("--quantity", help="Traces and ranks: draw these, such as noise. Repeatable.")
    ] = None,
    task: Task = None,
    dpi: Annotated[int, typer.Option(help="Resolution of .png.")] = 150,
    json: Json = False,
) -> None:
    """Draw a fit or draws: responses, latents with their data support, loadings, convergence, predictions.

    Of draws also traces, ranks, and with --recording a predictive check; responses and latents have bands.

    [bold]Examples[/bold]

        msrm plot fit.nc responses.png
        msrm plot fit.nc latents.png --what latents --recording rec.nc --run run-1
        msrm plot draws.nc traces.png --what traces --quantity noise --quantity response
        msrm plot out.nc p1.png --what prediction --recording rec.nc --participant p1 --modality rating
    """
    choice: dict[str, Any] = {"participants": participant, "runs": run, "modality": modality, "features": feature}
    choice |= {"quantities": quantity}
    _do("plot", json, archive, out, what, recording, task, choice, dpi)


@app.command(rich_help_panel="Looking")
def info(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A recording, an archive, a BIDS folder, or the folder of `msrm sample --path`."
        ),
    ],
    task: Task = None,
    json: Json = False,
) -> None:
    """Say what a file holds, after checking that it is intact.

    Of a recording: streams, clocks, missing data. Of an archive: model, settings, convergence, and what it was made
    with (versions, machine, threads, git state). Of a folder of draws: how many are there, and how to go on.
    """
    _do("info", json, path, task)


@app.command(rich_help_panel="Looking")
def doctor(
    probe: Annotated[bool, typer.Option(help="Start JAX in a child process to see its devices.")] = True,
    json: Json = False,
) -> None:
    """Look at this machine: packages, cores, BLAS threads, JAX and its GPU, each problem with the line to type.

    Ends with 1 when something that was asked for does not work.
    """
    _do("doctor", json, probe)


def main() -> None:
    """Run the command line."""
    warnings.showwarning = _say_warning
    app()


def _selection(task: str | None, *names: list[str] | None) -> dict[str, Any]:
    """The part of a recording that the options name."""
    given = dict(zip(("participants", "runs", "modalities"), names, strict=True))
    return ({} if task is None else {"task": task}) | {name: value for name, value in given.items() if value}


def _do(command: str, json: bool, *arguments: Any) -> None:
    """Run a command of `msrm.cli.work`, print its answer, and turn every problem into one line and an exit code."""
    try:
        # Imported here because xarray and SciPy take seconds that --help need not wait for.
        work = import_module("msrm.cli.work")
        action: Callable[..., Any] = getattr(work, command)
        answer = action(*arguments)
        typer.echo(answer.json() if json else answer.text())
    except KeyboardInterrupt as interrupt:
        typer.echo(f"msrm: {as_typed(str(interrupt), _Group.words) or 'interrupted'}", err=True)
        raise typer.Exit(130) from None
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError, MemoryError, RuntimeError) as error:
        if os.environ.get("MSRM_TRACEBACK") == "1":
            raise
        typer.echo("msrm: " + " ".join(as_typed(_told(error), _Group.words).split()), err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(answer.exit_code)


def _told(error: Exception) -> str:
    """What went wrong: the file first where the system says so, and notes such as where draws are."""
    notes = getattr(error, "__notes__", [])
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return ". ".join([f"{error.filename}: {error.strerror}", *notes])
    if isinstance(error, OSError) and error.strerror:
        return ". ".join([error.strerror, *notes])
    return ". ".join([str(error), *notes])


def _say_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Warnings in one line, without the source line that means nothing to a user of commands."""
    print(f"msrm: warning: {' '.join(str(message).split())}", file=sys.stderr)
