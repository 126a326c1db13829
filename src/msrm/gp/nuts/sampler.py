"""A NUTS run from a fitted model to draws on disk: what `msrm.gp.sampling` calls for ``sampler="nuts"``."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from msrm.gp.assembly import ChainDraws
from msrm.gp.data import NodeLayout
from msrm.gp.dense import Dense
from msrm.gp.gibbs.chains import light_layout
from msrm.gp.gibbs.state import State
from msrm.gp.gibbs.sweep import Sweeper
from msrm.gp.likelihood import Likelihood
from msrm.gp.nuts.chains import STATISTICS, NutsJob, run_chain, run_together
from msrm.gp.nuts.coordinates import Coordinates
from msrm.gp.nuts.density import runs_compiled
from msrm.gp.nuts.settings import NutsSettings
from msrm.gp.nuts.start import Beginning, begin, other_basins
from msrm.gp.parameters import FreeLengthScale
from msrm.gp.statespace import StateSpace
from msrm.gp.storage import DrawStore
from msrm.nodes import Backend
from msrm.runtime import blas_threads
from msrm.runtime.workers import parallel_map, worker_count
from msrm.sealed import replacing

__all__ = ["NutsRun"]


@dataclass(frozen=True, eq=False)
class NutsRun:
    """Everything that is decided before the first chain starts.

    Attributes
    ----------
    settings : NutsSettings
    layout : NodeLayout
        Without raw data.
    coordinates : Coordinates
    backend : Backend
        Of the density.
    grid : StateSpace
        That latents are drawn on.
    start : State
        The MAP, loadings on the prior's scale.
    starts : tuple of State
        One for each basin.
    """

    settings: NutsSettings
    layout: NodeLayout
    coordinates: Coordinates
    backend: Backend
    grid: StateSpace
    start: State
    starts: tuple[State, ...]

    @classmethod
    def of(
        cls, model: Any, likelihood: Likelihood, grid: StateSpace, start: State, settings: NutsSettings
    ) -> "NutsRun":
        """The run of a fitted model.

        Parameters
        ----------
        model : GPMSRM
        likelihood : Likelihood
            In rotated features.
        grid : StateSpace
            The fit's, or one within its tolerance.
        start : State
        settings : NutsSettings

        Raises
        ------
        ValueError
            For fewer loading rows than factors, or a dense metric that is too large.
        TypeError
            For a prior that NUTS does not know.
        """
        specification, layout = likelihood.specification, light_layout(likelihood.nodes)
        coordinates = Coordinates.of(specification, layout, start)
        settings.check_size(coordinates.size)
        learned = isinstance(specification.length_scale, FreeLengthScale)
        backend: Backend = replace(grid, length_scale_slope=learned)
        if model.model_.backend == "dense":
            backend = Dense(layout.groups, specification.n_factors, specification.matern, learned)
        starts = (start, *other_basins(start, model.starts_))
        return cls(settings, layout, coordinates, backend, grid, start, starts)

    @property
    def recorded(self) -> dict[str, Any]:
        """Settings, for the identity of the run."""
        return asdict(self.settings) | {"engine": "compiled" if runs_compiled(self.backend) else "numpy"}

    def job(self, store: DrawStore, *, chains: int, warmup: int, draws: int, seed: int) -> NutsJob:
        """What the chains of a run share, their starts included."""
        beginning = self._beginning(store.folder / "start.npz", chains, seed)
        return NutsJob(
            self.layout,
            self.backend,
            self.grid,
            self.start,
            beginning,
            store.folder,
            warmup,
            draws,
            seed,
            self.settings,
        )

    def run(self, store: DrawStore, *, chains: int, warmup: int, draws: int, seed: int, n_jobs: int) -> list[int]:
        """Run all chains to their end; the number of draws that each has on disk."""
        job = replace(self.job(store, chains=chains, warmup=warmup, draws=draws, seed=seed), supervised=True)
        if self.settings.chain_method == "vectorized":
            with blas_threads(1):
                return run_together(job, chains)
        workers = worker_count(n_jobs, chains) if self.settings.chain_method == "processes" else 1
        jobs = [(index,) for index in range(chains)]
        return parallel_map(run_chain, jobs, n_jobs=workers, shared=(job,), progress=False, stop=store.stop)

    def read(self, store: DrawStore, chains: int) -> ChainDraws:
        """All chains' draws, stacked."""
        arrays = store.read(chains)
        stats = {name: arrays.pop(name) for name in (*STATISTICS, "latent_power")}
        return ChainDraws(arrays, stats, {})

    def _beginning(self, path: Path, chains: int, seed: int) -> Beginning:
        """Starts and whitening, once for a run: resumed chains need the same to the last bit."""
        if path.exists():
            with np.load(path, allow_pickle=False) as file:
                return Beginning.from_arrays(self.coordinates, {name: file[name] for name in file.files})
        sweeper = Sweeper(self.coordinates.specification, self.layout, self.grid)
        made = begin(self.coordinates, sweeper, self.backend, self.starts, chains=chains, seed=seed)
        with replacing(path) as aside, aside.open("wb") as file:
            arrays: dict[str, Any] = made.arrays()
            np.savez(file, **arrays)
        return made
