"""Gibbs chains in processes of their own: start, warm-up with its tuning windows, draws flushed block by block.

A chain depends on its job and its number alone: the generator is spawned from the seed by the number, and everything a
chain needs to continue is stored with every block (:mod:`msrm.gp.storage`), so that resuming, or another number of
processes, changes no bit of any draw.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msrm.gp.data import NodeLayout, PairData
from msrm.gp.gibbs.state import Current, State
from msrm.gp.gibbs.sweep import Sweeper
from msrm.gp.parameters import Specification
from msrm.gp.statespace import StateSpace
from msrm.gp.storage import (
    FLUSH_SECONDS,
    PROGRESS_SECONDS,
    ChainStore,
    DrawStore,
    generator_from_state,
    generator_state,
)
from msrm.rotation import PairBlocks
from msrm.runtime.workers import uninterrupted

__all__ = ["ChainJob", "light_layout", "run_chain", "window_ends"]

# Proposals are refitted at these shares of the warm-up; the rest of it tunes their steps.
_WINDOWS = (0.05, 0.1, 0.25, 0.5, 0.9)


@dataclass(frozen=True, eq=False)
class ChainJob:
    """What every chain of a run shares.

    Attributes
    ----------
    specification : Specification
    layout : NodeLayout
        Without raw data (:func:`light_layout`).
    backend : StateSpace
    start : State
    folder : Path
        Of the :class:`DrawStore`.
    chains, warmup, draws, seed : int
    flush_seconds : float
        Draws are on disk at most this long after they are made.
    supervised : bool
        Whether chains run only inside :meth:`DrawStore.running`.
    """

    specification: Specification
    layout: NodeLayout
    backend: StateSpace
    start: State
    folder: Path
    chains: int
    warmup: int
    draws: int
    seed: int
    flush_seconds: float = FLUSH_SECONDS
    supervised: bool = False


def window_ends(warmup: int) -> set[int]:
    """Sweeps of warm-up after which proposals are fitted."""
    return {max(1, round(share * warmup)) for share in _WINDOWS}


def light_layout(layout: NodeLayout) -> NodeLayout:
    """The layout with rotated data in memory and no raw data: what a chain computes with, cheap to send."""
    return replace(layout, pairs=tuple(_light(pair) for pair in layout.pairs))


def _light(pair: PairData) -> PairData:
    blocks = PairBlocks((), (), pair.blocks.mean, pair.blocks.scale)
    if pair.reduced is None:
        raise ValueError(f"{pair.participant}/{pair.modality}: chains need rotated features")
    return replace(pair, blocks=blocks, reduced=replace(pair.reduced, blocks=blocks))


def run_chain(job: ChainJob, index: int) -> int:
    """Run one chain to its end, from wherever it stands on disk; the number of draws on disk.

    Parameters
    ----------
    job : ChainJob
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
        When the posterior precision cannot be factored at the start.
    """
    chain = _Chain(job, DrawStore(job.folder).chain(index), index)
    try:
        chain.run()
    except KeyboardInterrupt:
        chain.flush()
    except FloatingPointError:
        # What was drawn before is good; the error is the caller's to show.
        chain.flush()
        raise
    finally:
        if chain.done < job.draws:
            # The other chains stop as well.
            DrawStore(job.folder).stop()
    return chain.done


class _Chain:
    """One chain: position, generator, tuning, and draws not yet on disk."""

    def __init__(self, job: ChainJob, store: ChainStore, index: int) -> None:
        self.job, self.store = job, store
        self.sweeper = Sweeper(job.specification, job.layout, job.backend)
        self.parent = os.getppid()
        self.buffer: list[dict[str, NDArray[Any]]] = []
        self.saved = self.told = time.monotonic()
        last = store.last()
        if last is None:
            self.warm, self.done = 0, 0
            self.rng = np.random.default_rng(np.random.SeedSequence(job.seed).spawn(job.chains)[index])
            state = dispersed(self.rng, job.start, self.sweeper)
        else:
            self.warm, self.done = last.warmup, last.draws
            self.rng = generator_from_state(last.state["rng"])
            self.sweeper.load(last.state)
            state = job.start.from_arrays(last.state)
        self.current = self.sweeper.start(state)
        if not np.isfinite(self.current.log_likelihood):
            raise FloatingPointError(f"chain {index}: {_failure(self.current)}")

    @property
    def stopped(self) -> bool:
        """Whether another chain failed or was interrupted."""
        return self.job.supervised and not DrawStore(self.job.folder).is_running

    def run(self) -> None:
        if self.stopped:
            return
        windows = window_ends(self.job.warmup)
        while self.warm < self.job.warmup:
            with uninterrupted():
                self.advance(tune=True)
                self.warm += 1
                if self.warm in windows:
                    self.sweeper.end_window()
            self.report()
        while self.done + len(self.buffer) < self.job.draws:
            # Position, generator and draws on disk are of one sweep, so that a resumed chain draws what it would have.
            with uninterrupted():
                finished = self.advance(tune=False)
                self.buffer.append(record(self.sweeper, finished, self.current))
            self.report()
        self.flush()
        self.report(force=True)

    def advance(self, *, tune: bool) -> Current:
        """One sweep, and the log likelihood of the parameters it ends with."""
        finished = self.sweeper.sweep(self.rng, self.current, tune=tune)
        self.current = self.sweeper.marginal.current(finished.state, finished.design)
        if not np.isfinite(self.current.log_likelihood):
            raise FloatingPointError(_failure(self.current))
        return finished

    def report(self, *, force: bool = False) -> None:
        """Write progress and, when it is time, draws; stop when whoever started the chain is gone."""
        now = time.monotonic()
        if now - self.saved > self.job.flush_seconds:
            self.flush()
        if force or now - self.told > PROGRESS_SECONDS:
            self.told = now
            done = self.warm + self.done + len(self.buffer)
            self.store.tell(sweeps=done)
            if os.getppid() != self.parent or self.stopped:
                raise KeyboardInterrupt

    @uninterrupted()
    def flush(self) -> None:
        """Everything made so far onto disk."""
        state = self.current.state.arrays() | self.sweeper.arrays() | {"rng": generator_state(self.rng)}
        if self.buffer:
            draws = {name: np.array([draw[name] for draw in self.buffer]) for name in self.buffer[0]}
            self.store.append(self.done, self.warm, draws, state)
            self.done += len(self.buffer)
            self.buffer = []
        elif self.done == 0:
            self.store.checkpoint(self.warm, state)
        self.saved = time.monotonic()


def record(sweeper: Sweeper, finished: Current, following: Current) -> dict[str, NDArray[Any]]:
    """What is kept of a sweep.

    Parameters
    ----------
    sweeper : Sweeper
    finished : Current
        The sweep, latents drawn.
    following : Current
        The start of the next one, whose log likelihood is that of the parameters drawn.
    """
    size = sweeper.specification.n_factors
    values = sweeper.log_likelihoods(finished)
    squares = sum(np.square(states[:: _dimension(sweeper)]).sum() for states in finished.states.values())
    points = sum(len(states) // _dimension(sweeper) for states in finished.states.values())
    return {
        **finished.state.arrays(),
        "log_likelihood_marginal": np.array(following.log_likelihood),
        "log_likelihood": np.array(list(values.values())),
        "latent_power": np.array(squares / (points * size)),
        "acceptance": np.array(list(finished.acceptance.values())),
    }


def dispersed(rng: np.random.Generator, start: State, sweeper: Sweeper) -> State:
    """A start of its own for a chain: noise variances and free scalars spread around the common start."""
    noise = {key: v * float(np.exp(0.1 * rng.standard_normal())) for key, v in start.noise.items()}
    state = replace(start, noise=noise)
    for block, proposal in zip(sweeper.blocks, sweeper.proposals, strict=True):
        here = block.coordinates(state)
        there = here + proposal.root @ rng.standard_normal(len(here))
        inside = np.isfinite(block.log_density(there))
        for name, value in zip(block.names, block.values(there) if inside else block.values(here), strict=True):
            state = state.with_parameter(name, value)
    return state


def _dimension(sweeper: Sweeper) -> int:
    return sweeper.marginal.backend.matern.dimension


def _failure(current: Current) -> str:
    reasons: Mapping[str, str] = {
        run: posterior.factor.diagnostic for run, posterior in current.posteriors.items() if not posterior.factor.ok
    }
    told = "; ".join(f"{run}: {reason}" for run, reason in reasons.items())
    return told or "the log likelihood is not finite at the start"
