"""NUTS chains: NumPyro's kernel step by step, draws flushed block by block, one by one or all together.

A chain depends on its job and its number alone: NumPyro's whole state (position, adaptation, random key) is stored with
every block (:mod:`msrm.gp.storage`), and what a draw's latents are drawn with is seeded by its number, so that resuming
changes no bit of any draw. Every kept draw is turned by a uniform rotation, which makes its loadings draws of the
model's own posterior, and given latents by the Gibbs sampler's simulation smoother.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from numpyro.infer.hmc import hmc

from msrm.gp.data import NodeLayout
from msrm.gp.gibbs import moves
from msrm.gp.gibbs.chains import record
from msrm.gp.gibbs.state import State
from msrm.gp.gibbs.sweep import Sweeper
from msrm.gp.nuts.density import Density, runs_compiled
from msrm.gp.nuts.settings import NutsSettings
from msrm.gp.nuts.start import Beginning
from msrm.gp.programs import Program
from msrm.gp.statespace import StateSpace
from msrm.gp.storage import FLUSH_SECONDS, PROGRESS_SECONDS, ChainStore, DrawStore
from msrm.nodes import Backend

__all__ = ["STATISTICS", "NutsJob", "run_chain", "run_together"]

STATISTICS = (
    "diverging",
    "tree_depth",
    "reached_max_tree_depth",
    "n_steps",
    "energy",
    "acceptance_rate",
    "step_size",
    "lp",
)
_FIRST_STEP = 1.0  # times the dimension to the power -1/4, where an isotropic normal accepts about 0.8


@dataclass(frozen=True, eq=False)
class NutsJob:
    """What every chain of a run shares.

    Attributes
    ----------
    layout : NodeLayout
        Without raw data.
    backend : Backend
        Of the density.
    grid : StateSpace
        That latents are drawn on.
    start : State
        For what is fixed.
    beginning : Beginning
    folder : Path
        Of the :class:`DrawStore`.
    warmup, draws, seed : int
    settings : NutsSettings
    supervised : bool
        Stop when the folder's mark is gone.
    flush_seconds : float
    """

    layout: NodeLayout
    backend: Backend
    grid: StateSpace
    start: State
    beginning: Beginning
    folder: Path
    warmup: int
    draws: int
    seed: int
    settings: NutsSettings
    supervised: bool = False
    flush_seconds: float = FLUSH_SECONDS

    @cached_property
    def kernel(self) -> "_Kernel":
        """Compiled once for all chains of a process."""
        return _Kernel(self)


class _Kernel:
    """The density, NumPyro's kernel on it, and what turns its positions into draws."""

    def __init__(self, job: NutsJob) -> None:
        self.job, self.beginning = job, job.beginning
        coordinates = job.beginning.coordinates
        self.density = Density(coordinates, job.backend, compiled=runs_compiled(job.backend))
        self.sweeper = Sweeper(coordinates.specification, job.layout, job.grid)
        self._start, self._next = hmc(potential_fn_gen=self.density.potential, algo="NUTS")
        self.arguments = self.density.data, jax.tree.map(jnp.asarray, self.beginning.whitening)
        made_of = None if self.density.made_of is None else (self.density.made_of, job.settings, job.warmup)
        self._first, self.step, self.step_all = (
            Program(function, made_of) for function in (self._begun, self._stepped, self._all_stepped)
        )

    def first(self, index: int) -> Any:
        """State of a chain before its first step."""
        z = self.beginning.whitening.inverse(self.beginning.points[index])
        key = jax.random.fold_in(jax.random.PRNGKey(self.job.seed), index)
        return self._first(jnp.asarray(z), key, self.arguments)

    def _begun(self, z: Any, key: Any, arguments: Any) -> Any:
        settings = self.job.settings
        state = self._start(
            z,
            self.job.warmup,
            step_size=_FIRST_STEP * len(z) ** -0.25,
            dense_mass=settings.metric == "dense",
            target_accept_prob=settings.target_accept,
            max_tree_depth=int(settings.max_tree_depth),
            model_args=arguments,
            rng_key=key,
        )
        # Numbers become arrays of their own type, as after a step: the kernel compiles once.
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), state)

    def _stepped(self, state: Any, arguments: Any) -> Any:
        self._prepare(state.z, state.rng_key, arguments)
        return self._next(state, arguments)

    def _all_stepped(self, states: Any, arguments: Any) -> Any:
        self._prepare(states.z[0], states.rng_key[0], arguments)
        return jax.vmap(self._next, in_axes=(0, None))(states, arguments)

    def _prepare(self, z: Any, key: Any, arguments: Any) -> None:
        """NumPyro's step uses the settings of a start traced before it, which may have come compiled from elsewhere."""
        jax.eval_shape(self._begun, z, key, arguments)

    def draws(self, index: int, first: int, positions: Sequence[NDArray[np.float64]]) -> list[dict[str, Any]]:
        """What is kept of positions z, the first of which is draw number `first`."""
        whitening = self.beginning.whitening
        packed, log_prior = self.density.parts(np.array([whitening.centre + whitening.moved(z) for z in positions]))
        out = []
        for place, (parameters, prior) in enumerate(zip(packed, log_prior, strict=True)):
            rng = np.random.default_rng((self.job.seed, index, first + place))
            current = self.sweeper.start(self.beginning.coordinates.state(parameters, self.job.start))
            self.sweeper.draw_latents(rng, current)
            moves.rotate(rng, current)
            kept = record(self.sweeper, current, current)
            del kept["acceptance"]
            out.append(kept | {"log_prior": np.array(prior)})
        return out

    @property
    def interrupted(self) -> bool:
        """Whether a keyboard interrupt arrived inside the likelihood."""
        return self.density.host is not None and self.density.host.interrupted


class _Chain:
    """One chain: NumPyro's state, and draws not yet on disk."""

    def __init__(self, job: NutsJob, index: int) -> None:
        self.job, self.index = job, index
        self.store: ChainStore = DrawStore(job.folder).chain(index)
        self.parent = os.getppid()
        self.state = job.kernel.first(index)
        self.warm, self.done, self.leapfrogs = 0, 0, 0
        self.positions: list[NDArray[np.float64]] = []
        self.statistics: list[dict[str, Any]] = []
        self.saved = self.told = time.monotonic()
        last = self.store.last()
        if last is not None:
            self.warm, self.done = last.warmup, last.draws
            leaves, tree = jax.tree.flatten(self.state)
            stored = [jnp.asarray(last.state[f"leaf.{place:02d}"]) for place in range(len(leaves))]
            self.state = jax.tree.unflatten(tree, stored)
        if not np.isfinite(self.state.potential_energy):
            raise FloatingPointError(f"chain {index}: the log density is not finite at the start")

    @property
    def made(self) -> int:
        """Steps so far, warm-up included."""
        return self.warm + self.done + len(self.positions)

    @property
    def ended(self) -> bool:
        """Whether all draws are made."""
        return self.warm == self.job.warmup and self.done + len(self.positions) >= self.job.draws

    def take(self, state: Any) -> None:
        """Go on to the next state."""
        self.state = state
        self.leapfrogs += int(state.num_steps)
        if self.warm < self.job.warmup:
            self.warm += 1
        else:
            self.positions.append(np.asarray(state.z))
            self.statistics.append(_statistics(state, int(self.job.settings.max_tree_depth)))
        now = time.monotonic()
        if now - self.saved > self.job.flush_seconds:
            self.flush()
        if now - self.told > PROGRESS_SECONDS or self.ended:
            self.tell()

    def tell(self) -> None:
        """Write progress; stop when another chain has, or whoever started this one is gone."""
        self.told = time.monotonic()
        self.store.tell(sweeps=self.made, leapfrogs=self.leapfrogs)
        if os.getppid() != self.parent or (self.job.supervised and not DrawStore(self.job.folder).is_running):
            raise KeyboardInterrupt

    def flush(self) -> None:
        """Everything made so far onto disk."""
        leaves = jax.tree.leaves(self.state)
        state = {f"leaf.{place:02d}": np.asarray(leaf) for place, leaf in enumerate(leaves)}
        if self.positions:
            made = self.job.kernel.draws(self.index, self.done, self.positions)
            each = [draw | own for draw, own in zip(made, self.statistics, strict=True)]
            draws = {name: np.array([draw[name] for draw in each]) for name in each[0]}
            draws["log_likelihood_marginal"] = draws["lp"] - draws.pop("log_prior")
            self.store.append(self.done, self.warm, draws, state)
            self.done += len(self.positions)
            self.positions, self.statistics = [], []
        elif self.done == 0:
            self.store.checkpoint(self.warm, state)
        self.saved = time.monotonic()


def _statistics(state: Any, deepest: int) -> dict[str, Any]:
    """NumPyro's record of a step under ArviZ's names."""
    steps = int(state.num_steps)
    values = (
        bool(state.diverging),
        steps.bit_length(),
        steps >= 2**deepest - 1,
        steps,
        float(state.energy),
        float(state.accept_prob),
        float(state.adapt_state.step_size),
        -float(state.potential_energy),
    )
    return dict(zip(STATISTICS, values, strict=True))


def run_chain(job: NutsJob, index: int) -> int:
    """Run one chain to its end, from wherever it stands on disk; the number of draws on disk.

    Parameters
    ----------
    job : NutsJob
    index : int
        Of the chain, from 0.

    Returns
    -------
    int
        Fewer than asked when the keyboard interrupted it.

    Raises
    ------
    OSError
        When a block cannot be written.
    FloatingPointError
        When the log density is not finite at the start.
    """
    chain = _Chain(job, index)

    def advance() -> None:
        state = job.kernel.step(chain.state, job.kernel.arguments)
        jax.block_until_ready(state.num_steps)
        _take(job, [chain], [state])

    return _run(job, [chain], advance)[0]


def run_together(job: NutsJob, chains: int) -> list[int]:
    """Run all chains in step, one compiled function for all; as :func:`run_chain`, a number for each."""
    running = [_Chain(job, index) for index in range(chains)]

    def advance() -> None:
        # After a kill some are ahead; they wait, so that every chain goes on as if nothing had happened.
        least = min(chain.made for chain in running)
        states = job.kernel.step_all(
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *(chain.state for chain in running)), job.kernel.arguments
        )
        jax.block_until_ready(states.num_steps)
        behind = [chain for chain in running if chain.made == least]
        _take(job, behind, [jax.tree.map(lambda leaf, at=c.index: leaf[at], states) for c in behind])

    return _run(job, running, advance)


def _take(job: NutsJob, chains: Sequence[_Chain], states: Sequence[Any]) -> None:
    if job.kernel.interrupted:
        raise KeyboardInterrupt
    for chain, state in zip(chains, states, strict=True):
        chain.take(state)


def _run(job: NutsJob, chains: Sequence[_Chain], advance: Callable[[], None]) -> list[int]:
    """Advance until all chains have ended; whatever happens, what was made goes to disk."""
    try:
        for chain in chains:
            chain.tell()
        while not all(chain.ended for chain in chains):
            advance()
    except KeyboardInterrupt:
        pass
    finally:
        for chain in chains:
            chain.flush()
        if any(chain.done < job.draws for chain in chains):
            # The other chains stop as well.
            DrawStore(job.folder).stop()
    return [chain.done for chain in chains]
