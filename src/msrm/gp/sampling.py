"""``gp.sample``: chains of a fitted model on a recording, on disk as they are made, one `Draws` at the end (DESIGN 5).

A run is bound to its data, settings, versions and device; with a path, a killed run continues bit for bit.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from msrm import runtime
from msrm.asking import takes_recording
from msrm.gp.assembly import ChainDraws, assembled, scalar_names
from msrm.gp.backends import select_likelihood
from msrm.gp.data import NodeLayout
from msrm.gp.devices import cuda_problem, start_jax, sweep_placement, use_compilation_cache
from msrm.gp.draws import Draws
from msrm.gp.fitted import starting_length_scale
from msrm.gp.gibbs.chains import ChainJob, light_layout, run_chain
from msrm.gp.gibbs.compiled import unsupported
from msrm.gp.gibbs.grid import sampling_grid
from msrm.gp.gibbs.start import balanced, state_of, within_bounds
from msrm.gp.gibbs.state import State
from msrm.gp.gibbs.sweep import Sweeper
from msrm.gp.likelihood import Likelihood
from msrm.gp.nuts.settings import NutsSettings
from msrm.gp.parameters import Specification
from msrm.gp.statespace import StateSpace
from msrm.gp.storage import DrawStore
from msrm.gp.tree import model_arguments
from msrm.gp.watching import Watch
from msrm.recording import Recording
from msrm.runtime.warn import visible_gpus
from msrm.runtime.workers import parallel_map, worker_count

__all__ = ["SAMPLERS", "checked_options", "draw_folder", "sample"]


# An error whose standard deviation over the posterior is s nats moves posterior means by about s of their standard
# deviations at most: twice the tolerance of a fit's log likelihood does no harm here.
_VARIATION = 2.0


@takes_recording
def sample(
    model: Any,
    recording: Recording,
    *,
    sampler: str = "gibbs",
    chains: int = 4,
    warmup: int = 1000,
    draws: int = 1000,
    seed: int = 0,
    path: str | Path | None = None,
    resume: bool = False,
    n_jobs: int = -1,
    progress: bool | None = None,
    **settings: Any,
) -> Draws:
    """Draw from the posterior of a fitted model.

    Parameters
    ----------
    model : GPMSRM
        Whose method this is, fitted to `recording`: chains start from its MAP.
    recording : Recording
    sampler : {"gibbs", "nuts"}
    chains, warmup, draws : int
        Warm-up sweeps tune the proposals (NUTS: step and metric) and are not kept; draws are, from each chain.
    seed : int
    path : path-like, optional
        A folder for the blocks of draws; kept afterwards. Without it they live in a temporary folder.
    resume : bool
        Continue the run of `path`; with more `draws` than it was started with, extend it.
    n_jobs : int
        Processes; -1 for one a chain, as far as there are cores. Any number gives the same draws. NUTS starts them
        under ``chain_method="processes"`` alone.
    progress : bool, optional
        Draw a bar with sweeps per second, time left and the effective draws so far of the slowest quantity; by default
        on a terminal only.
    **settings
        Of NUTS (:class:`msrm.gp.nuts.settings.NutsSettings`): ``metric``, ``chain_method``, ``target_accept``,
        ``max_tree_depth``.

    Returns
    -------
    Draws

    Raises
    ------
    ValueError
        For unusable arguments, a recording that is not the fit's, or resuming another run (every difference named).
    TypeError
        For a setting that the sampler does not have.
    FileExistsError
        When `path` holds a run and `resume` is not set.
    OSError
        When `path` is a file or a block cannot be written: every chain stops, earlier blocks are safe.
    KeyboardInterrupt
        On Ctrl-C; the message says where the draws made so far are and how to continue.
    """
    counts = {"chains": chains, "warmup": warmup, "draws": draws, "seed": seed}
    asked = checked_options(sampler, counts, settings, path=path, resume=resume)
    counts = {name: int(count) for name, count in counts.items()}
    _check_fitted(model, recording)
    fitted = model.model_
    likelihood, _ = model.prepared(recording, reduce=True, standardization=fitted.standardization)
    specification, layout = likelihood.specification, likelihood.nodes
    start = within_bounds(specification, state_of(specification, layout, fitted.parameters))
    backend = _grid_backend(likelihood, start, _VARIATION * model.likelihood_tolerance)
    start = balanced(Sweeper(specification, layout, backend), start)
    run = SAMPLERS[sampler](model, likelihood, backend, start, asked, counts)
    recorded = {"sampler": sampler, **counts, **run.recorded}
    identity = _identity(model, recording, recorded, backend)
    with draw_folder(path) as folder:
        store = (DrawStore.resume if resume else DrawStore.create)(folder, identity)
        _check_length(store, draws)
        labels = {
            "log_likelihood_marginal": ["log_likelihood_marginal"],
            "noise": [f"noise[{p}/{m}]" for p, m in start.noise],
            "scalars": scalar_names(start),
        }
        with store.running(), Watch(store, chains, chains * (warmup + draws), labels, enabled=progress):
            done = run.run(store, **counts, n_jobs=n_jobs)
        if min(done) < draws:
            raise KeyboardInterrupt
        read = run.read(store, chains)
        attributes = {**recorded, "step": backend.step, "residual": sorted(backend.residual)}
        return assembled(model, recording, specification, layout, start, read, attributes)


@contextmanager
def draw_folder(path: str | Path | None) -> Iterator[Path]:
    """The folder for the blocks of a run: `path`, or a temporary one that goes when the block ends well.

    When it does not, the error says where the draws made so far are; a temporary folder without any goes.
    """
    folder = Path(tempfile.mkdtemp(prefix="msrm-draws-")) if path is None else Path(path)
    try:
        yield folder
    except BaseException as error:
        held = DrawStore(folder).progress()
        if path is None and held is None:
            shutil.rmtree(folder, ignore_errors=True)
        told = f"sampling stopped with {held} in {folder}; continue with path={str(folder)!r}, resume=True"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(told if held else "sampling stopped before any draw was on disk") from None
        if held and path is None:
            error.add_note(told)
        raise
    if path is None:
        shutil.rmtree(folder)


@dataclass(frozen=True, eq=False)
class GibbsRun:
    """A Gibbs run before its first chain starts."""

    specification: Specification
    layout: NodeLayout
    backend: StateSpace
    start: State

    @property
    def recorded(self) -> dict[str, Any]:
        """Settings: there are none."""
        return {}

    def run(self, store: DrawStore, *, chains: int, warmup: int, draws: int, seed: int, n_jobs: int) -> list[int]:
        """Run all chains to their end; the number of draws that each has on disk."""
        light, folder = light_layout(self.layout), store.folder
        job = ChainJob(
            self.specification, light, self.backend, self.start, folder, chains, warmup, draws, seed, supervised=True
        )
        jobs = [(index,) for index in range(chains)]
        workers = worker_count(n_jobs, chains)
        return parallel_map(run_chain, jobs, n_jobs=workers, shared=(job,), progress=False, stop=store.stop)

    def read(self, store: DrawStore, chains: int) -> ChainDraws:
        """All chains' draws, stacked."""
        arrays = store.read(chains)
        stats = {name: arrays.pop(name) for name in ("acceptance", "latent_power")}
        sweeper = Sweeper(self.specification, self.layout, self.backend)
        return ChainDraws(arrays, stats, {"acceptance": [block.label for block in sweeper.blocks]})


def _gibbs(
    model: Any,
    likelihood: Likelihood,
    grid: StateSpace,
    start: State,
    settings: None,
    counts: Mapping[str, int],
) -> Any:
    specification, layout = likelihood.specification, likelihood.nodes
    placement = sweep_placement(model.device, grid, counts, unsupported(specification, layout))
    if placement.platform == "cpu":
        return GibbsRun(specification, layout, grid, start)
    use_compilation_cache()
    return import_module("msrm.gp.gibbs.native").NativeGibbsRun(specification, layout, grid, start)


def _nuts(
    model: Any,
    likelihood: Likelihood,
    grid: StateSpace,
    start: State,
    settings: NutsSettings,
    counts: Mapping[str, int],
) -> Any:
    # JAX is loaded by those who ask for it.
    start_jax()
    if visible_gpus() and not cuda_problem(probe=False):
        if model.device == "cpu":
            raise ValueError(
                "device='cpu': NUTS runs where JAX does, on a card here. Before Python: export JAX_PLATFORMS=cpu"
            )
        use_compilation_cache()
    return import_module("msrm.gp.nuts.sampler").NutsRun.of(model, likelihood, grid, start, settings)


def _no_settings(settings: dict[str, Any]) -> None:
    if settings:
        raise TypeError(f'{", ".join(settings)}: no setting of sampler="gibbs", which has none; sampler="nuts" has.')


SAMPLERS: dict[str, Any] = {"gibbs": _gibbs, "nuts": _nuts}
_SETTINGS: dict[str, Callable[[dict[str, Any]], Any]] = {"gibbs": _no_settings, "nuts": NutsSettings.of}


def checked_options(
    sampler: str, counts: Mapping[str, int], settings: dict[str, Any], *, path: str | Path | None, resume: bool
) -> Any:
    """A sampler's settings, after all that :func:`sample` can refuse without a model.

    Raises
    ------
    ValueError, TypeError
        As :func:`sample`.
    """
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler must be one of {', '.join(map(repr, SAMPLERS))}, found {sampler!r}.")
    for name, count in counts.items():
        least = 0 if name in ("warmup", "seed") else 1
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < least:
            raise ValueError(f"{name} must be an integer of at least {least}, found {count!r}.")
    if not isinstance(resume, bool | np.bool_):
        raise TypeError(f"resume must be True or False, found {resume!r}.")
    if path is not None and (not isinstance(path, str | PathLike) or not str(path)):
        raise TypeError(f"path must be a folder for the blocks of draws, or None, found {path!r}.")
    if resume and path is None:
        raise ValueError("resume=True needs the path of the run to continue.")
    if path is not None and Path(path).is_file():
        raise NotADirectoryError(f"path={str(path)!r} is a file; name a folder for the blocks of draws.")
    if not resume and path is not None:
        DrawStore(Path(path)).check_unused()
    return _SETTINGS[sampler](settings)


def _check_length(store: DrawStore, draws: int) -> None:
    """Refuse to make a run shorter than it is."""
    longest = max((last.draws for last in store.checkpoints() if last is not None), default=0)
    if longest > draws:
        raise ValueError(
            f"{store.folder} holds {longest} draws of a chain, more than draws={draws}; ask for at least as many."
        )


def _check_fitted(model: Any, recording: Recording) -> None:
    """Refuse a model without a MAP, or a recording that it is not the MAP of."""
    if not hasattr(model, "model_"):
        raise ValueError("This GPMSRM is not fitted yet; call fit(recording) first: chains start from the MAP.")
    if recording.digest() == model.recording_digest_:
        return
    people, modalities = (dict.fromkeys(names) for names in zip(*model.model_.features, strict=True))
    there = {"runs": tuple(model.model_.runs), "participants": tuple(people), "modalities": tuple(modalities)}
    told = [
        f"{name} {', '.join(here)} here, {', '.join(there[name])} fitted"
        for name in there
        if set(here := getattr(recording, name)) != set(there[name])
    ]
    told = told or [f"digest {recording.digest()[:12]}..., the fit's {model.recording_digest_[:12]}..."]
    raise ValueError(
        f"The recording is not the one that was fitted ({'; '.join(told)}). Fit it first: chains start from its MAP."
    )


def _grid_backend(likelihood: Likelihood, start: State, tolerance: float) -> StateSpace:
    """A grid whose error hardly varies over the posterior."""
    specification = likelihood.specification
    chosen = select_likelihood(
        "statespace",
        likelihood.nodes.groups,
        specification.n_factors,
        matern=specification.matern,
        length_scale=starting_length_scale(specification),
        length_scale_slope=False,
    ).backend
    assert isinstance(chosen, StateSpace)
    return sampling_grid(specification, likelihood.nodes, chosen, start, tolerance)


def _identity(model: Any, recording: Recording, settings: dict[str, Any], backend: StateSpace) -> dict[str, Any]:
    """What a run is bound to (DESIGN 5): data, settings, versions, device."""
    facts = runtime.describe()
    return {
        "data": recording.digest(),
        # How many draws is no part of what they are: asking for more extends a run.
        "settings": {
            **{n: v for n, v in settings.items() if n != "draws"},
            "model": model_arguments(model),
            "step": backend.step,
            "residual": sorted(backend.residual),
        },
        "start": {"objective": model.objective_},
        "versions": {"python": facts["python"], **facts["versions"]},
        "device": {
            "processor": facts["processor"],
            # Libraries are found in the order that they were loaded in.
            "blas": sorted([one["library"], one["version"], one["architecture"]] for one in facts["blas"]),
        },
    }
