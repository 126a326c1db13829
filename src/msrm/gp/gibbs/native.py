"""Gibbs chains on a device: all of them advance together, many compiled sweeps in one dispatch (DESIGN 5, 7).

The host starts chains, fits proposals at the ends of warm-up windows and writes blocks of draws, as
`msrm.gp.gibbs.chains` does for one chain a process; a sweep depends on its state, its tuning and its number alone, so
that resuming changes no bit.
"""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from msrm.gp.assembly import ChainDraws
from msrm.gp.cyclic import Parallel
from msrm.gp.data import NodeLayout
from msrm.gp.gibbs.chains import dispersed, light_layout, window_ends
from msrm.gp.gibbs.compiled import unsupported
from msrm.gp.gibbs.native_data import ChainState
from msrm.gp.gibbs.native_proposals import ROOM, Tuning
from msrm.gp.gibbs.native_sweep import NativeSweeper
from msrm.gp.gibbs.proposals import BlockProposal
from msrm.gp.gibbs.state import State
from msrm.gp.gibbs.sweep import Sweeper
from msrm.gp.jax_settings import FLOAT
from msrm.gp.parameters import Specification
from msrm.gp.programs import Program
from msrm.gp.statespace import StateSpace
from msrm.gp.storage import FLUSH_SECONDS, DrawStore
from msrm.runtime.workers import uninterrupted

__all__ = ["NativeGibbsRun"]

_SWEEPS = 25  # a dispatch: a second of work or less, so that an interrupt is soon heard
_MORE_ROOM = 1.5
_FEW_OUTGROWN = 0.25  # of the sweeps of a dispatch: more are no walk that is too long, but a chain on its way out
Draws = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class NativeGibbsRun:
    """A Gibbs run on the default device before its first sweep.

    Attributes
    ----------
    specification : Specification
    layout : NodeLayout
    backend : StateSpace
    start : State

    Raises
    ------
    NotImplementedError
        For a part of the model that only the CPU's sampler has; the message says which.
    """

    specification: Specification
    layout: NodeLayout
    backend: StateSpace
    start: State

    def __post_init__(self) -> None:
        missing = unsupported(self.specification, self.layout)
        if missing:
            raise NotImplementedError(
                f'the compiled Gibbs sampler does not have {missing}. Sample with device="cpu", which has.'
            )

    @property
    def recorded(self) -> dict[str, Any]:
        """What the draws are bound to beside the sampler's settings."""
        device = jax.devices()[0]
        return {"platform": device.platform, "device_kind": device.device_kind, "sweeps_per_dispatch": _SWEEPS}

    def run(self, store: DrawStore, *, chains: int, warmup: int, draws: int, seed: int, n_jobs: int) -> list[int]:
        """Run all chains to their end; the number of draws that each has on disk. ``n_jobs`` is the CPU's."""
        together = _Chains(self, store, chains, warmup, draws, seed)
        try:
            together.run()
        finally:
            together.flush()
        return [together.on_disk] * chains

    def read(self, store: DrawStore, chains: int) -> ChainDraws:
        """All chains' draws, stacked."""
        arrays = store.read(chains)
        stats = {name: arrays.pop(name) for name in ("acceptance", "latent_power")}
        labels = [block.label for block in Sweeper(self.specification, self.layout, self.backend).blocks]
        return ChainDraws(arrays, stats, {"acceptance": labels})


@dataclass(eq=False)
class _Chains:
    """All chains: positions, tuning, and draws not yet on disk."""

    job: NativeGibbsRun
    store: DrawStore
    chains: int
    warmup: int
    draws: int
    seed: int
    room: float = ROOM
    buffer: list[Draws] = field(default_factory=list)

    def __post_init__(self) -> None:
        job = self.job
        self.host = Sweeper(job.specification, job.layout, job.backend)
        self.number, self.on_disk, self.saved = 0, 0, time.monotonic()
        seeds = np.random.SeedSequence(self.seed).spawn(self.chains)
        self.keys = jax.random.wrap_key_data(jnp.asarray(np.array([one.generate_state(2) for one in seeds], np.uint32)))
        self.proposals = [[block.first_proposal() for block in self.host.blocks] for _ in range(self.chains)]
        self.states = self._resumed() or [dispersed(np.random.default_rng(one), job.start, self.host) for one in seeds]
        self._build()

    def _resumed(self) -> list[State] | None:
        """The chains' states on disk, at the last sweep that all of them have."""
        lasts = [self.store.last_of(index) for index in range(self.chains)]
        if any(last is None for last in lasts):
            return None
        common = min(last.draws for last in lasts if last is not None)
        states = []
        for index, proposals in enumerate(self.proposals):
            chain = self.store.chain(index)
            # A kill between two chains' blocks: what is made again is the same.
            while (last := chain.last()) is not None and last.draws > common:
                chain.blocks()[-1].unlink()
            if last is None:
                return None
            self.number, self.on_disk, self.room = last.warmup + last.draws, last.draws, float(last.state["room"])
            states.append(self.job.start.from_arrays(last.state))
            for place, proposal in enumerate(proposals):
                proposal.load({name: last.state[f"block.{place}.{name}"] for name in proposal.arrays()})
        return states

    def _build(self) -> None:
        # What is compiled follows from the start and the room alone, so that resuming compiles the same.
        values = {modality: dict(one) for modality, one in self.job.start.responses.items()}
        self.sweeper = NativeSweeper(
            self.job.specification, self.job.layout, self.job.backend, Parallel(), values=values, room=self.room
        )
        some = partial(self.sweeper.sweeps, count=_SWEEPS)
        over_chains = jax.vmap(some, in_axes=(None, 0, 0, 0, 0, None, None))
        job = self.job
        made_of = job.specification, light_layout(job.layout), job.backend, values, self.room, _SWEEPS
        self.compiled = Program(over_chains, made_of)
        self.places = {
            place: (modality, index, row)
            for modality, stacks in self.sweeper.stacks.items()
            for index, stack in enumerate(stacks.stacks)
            for row, place in enumerate(stack.places)
        }

    def run(self) -> None:
        """To the end, unless another process or the keyboard says stop."""
        total = self.warmup + self.draws
        ends = sorted(window_ends(self.warmup) | {self.warmup, total})
        while self.number < total:
            if not self.store.is_running:
                raise KeyboardInterrupt
            end = next(one for one in ends if one > self.number)
            self._advance(min(_SWEEPS, end - self.number))
            if time.monotonic() - self.saved > FLUSH_SECONDS:
                self.flush()
            for index in range(self.chains):
                self.store.chain(index).tell(sweeps=self.number)

    def _advance(self, count: int) -> None:
        """One dispatch, of which ``count`` sweeps are kept."""
        tune = self.number < self.warmup
        at = self._stacked(), *self._tunings(), jnp.asarray(self.number), tune
        made = jax.device_get(self.compiled(self.sweeper.data, self.keys, *at))
        made = jax.tree.map(lambda values: values[:, :count], made)
        finite = np.isfinite(made["value"]).all(axis=1)
        # Warm-up may turn down a few wild proposals; draws may not, and each would have been part of the chain.
        few = _FEW_OUTGROWN if tune and finite.all() else 0.0
        if made["outgrown"].mean() > few:
            self.room *= _MORE_ROOM
            self._build()
            return self._advance(count)
        if not finite.all():
            raise FloatingPointError(f"chain {int(np.argmin(finite))}: the log likelihood is not finite")
        return self._moved_on(self._draws(made), made, count, tune=tune)

    @uninterrupted()
    def _moved_on(self, draws: Draws, made: dict[str, Any], count: int, *, tune: bool) -> None:
        """Take over what a dispatch made: states, tuning and draws of the same sweep."""
        self.states = [
            self.job.start.from_arrays({name: values[index, -1] for name, values in draws.items()})
            for index in range(self.chains)
        ]
        for index, proposals in enumerate(self.proposals):
            for place, (block, proposal) in enumerate(zip(self.host.blocks, proposals, strict=True)):
                log_size, seen = made["walks"][index, -1, place]
                proposal.walk.log_size, proposal.walk.seen = float(log_size), int(seen)
                if tune:
                    taken = made["independent"][index, :, place]
                    proposal.accepted += [made["acceptance"][index, taken, place].sum(), taken.sum()]
                    names = [name.rsplit("/", 1)[1] for name in block.names]
                    values = [made["state"].responses[block.modalities[0]][name][index] for name in names]
                    columns = [np.log(v) if log else v for v, log in zip(values, block.logarithmic, strict=True)]
                    proposal.window += list(np.stack(columns, axis=1))
        self.number += count
        if not tune:
            self.buffer.append(draws)
        elif self.number in window_ends(self.warmup) - {self.warmup}:
            for proposals in self.proposals:
                for proposal in proposals:
                    proposal.fit()

    def _stacked(self) -> ChainState:
        """All chains' states on the device, chains first."""
        first = self.states[0]
        rows = [np.stack([state.rows[key] for state in self.states]) for key in first.rows]
        stacks = {
            modality: tuple(
                jnp.asarray(np.stack([rows[place] for place in stack.places], axis=1), FLOAT) for stack in of.stacks
            )
            for modality, of in self.sweeper.stacks.items()
        }
        noise = np.array([list(state.noise.values()) for state in self.states])
        responses = {
            modality: {
                name: jnp.asarray([state.responses[modality][name] for state in self.states], FLOAT) for name in values
            }
            for modality, values in first.responses.items()
            if values
        }
        return ChainState(stacks, jnp.asarray(noise, FLOAT), responses)

    def _tunings(self) -> tuple[list[Tuning], Array]:
        """Proposals of every block, and lengths of their walks (chain, block, 2)."""
        tunings = [
            Tuning(*(jnp.asarray(np.stack(parts)) for parts in zip(*map(_tuning, of), strict=True)))
            for of in zip(*self.proposals, strict=True)
        ]
        walks = [[[one.walk.log_size, one.walk.seen] for one in proposals] for proposals in self.proposals]
        return tunings, jnp.asarray(np.array(walks, float).reshape(self.chains, len(self.host.blocks), 2))

    def _draws(self, made: dict[str, Any]) -> Draws:
        """Arrays (chain, sweep, ...) as `msrm.gp.gibbs.chains.record` names them."""
        state, first = made["state"], self.job.start
        out = {}
        for place in range(len(first.rows)):
            modality, index, row = self.places[place]
            out[f"rows.{place}"] = state.rows[modality][index][:, :, row]
        out["noise"] = state.noise
        scalars = [state.responses[modality][name] for modality, values in first.responses.items() for name in values]
        constant = [first.length_scale, *first.timescales.values()]
        out["scalars"] = np.stack([*scalars, *(np.full(state.noise.shape[:2], one) for one in constant)], axis=-1)
        out["log_likelihood_marginal"] = made["value"]
        runs, parts = list(self.job.layout.groups), []
        for place, pair in enumerate(self.sweeper.design.pairs.values()):
            modality, index, row = self.places[place]
            parts += [made["conditional"][modality][index][:, :, row, runs.index(run)] for run in pair.nodes]
        out["log_likelihood"] = np.stack(parts, axis=-1)
        return out | {"latent_power": made["latent_power"], "acceptance": made["acceptance"]}

    def flush(self) -> None:
        """Everything made so far onto disk."""
        for index, (state, proposals) in enumerate(zip(self.states, self.proposals, strict=True)):
            arrays = state.arrays() | {"room": np.array(self.room)}
            for place, proposal in enumerate(proposals):
                arrays |= {f"block.{place}.{name}": value for name, value in proposal.arrays().items()}
            chain = self.store.chain(index)
            if self.buffer:
                draws = {name: np.concatenate([part[name][index] for part in self.buffer]) for name in self.buffer[0]}
                chain.append(self.on_disk, self.warmup, draws, arrays)
            elif self.on_disk == 0:
                chain.checkpoint(min(self.number, self.warmup), arrays)
        self.on_disk += sum(len(part["noise"][0]) for part in self.buffer)
        self.buffer, self.saved = [], time.monotonic()


def _tuning(proposal: BlockProposal) -> tuple[NDArray[Any], ...]:
    inverse = np.linalg.inv(proposal.root)
    return proposal.root, inverse, proposal.mean, np.asarray(proposal.fitted), np.asarray(proposal.share)
