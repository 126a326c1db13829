"""Densities of blocks given the other blocks, at one setting of the parameters (DESIGN 5).

A block is a participant's modality in a run. With D, h and c of DESIGN 3.1 a sum over blocks, leaving one out subtracts
its part: ``log p(block | others) = log p(all) - log p(others)``, both with the latents integrated out.

Where a modality has a power a, the posterior sees the block's likelihood raised to a (the *share*, by which draws are
weighted when the block is left out). The block itself is predicted with its noise as it is, N(0, v), from latents given
the others, as :meth:`msrm.GPMSRM.predict` does: powers say how much to trust data, not how noisy data will be.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from msrm.gp.data import Key, NodeLayout
from msrm.gp.gibbs.design import Design
from msrm.gp.gibbs.marginal import Marginal
from msrm.gp.gibbs.state import State
from msrm.gp.parameters import Specification
from msrm.gp.statespace import StateSpace
from msrm.nodes import GroupStatistics

__all__ = ["Block", "LeftOut"]

Array = NDArray[np.float64]
Block = tuple[str, str, str]  # participant, modality, run


@dataclass(frozen=True, eq=False)
class LeftOut:
    """The densities of a recording's blocks as a function of the parameters.

    Attributes
    ----------
    specification : Specification
    layout : NodeLayout
    marginal : Marginal
        On the grid that the draws were made on.
    """

    specification: Specification
    layout: NodeLayout
    marginal: Marginal

    @classmethod
    def of(cls, specification: Specification, layout: NodeLayout, backend: StateSpace) -> "LeftOut":
        """The densities on a backend's grid."""
        return cls(specification, layout, Marginal(specification, layout, backend))

    @property
    def blocks(self) -> list[Block]:
        """Participant, modality and run of every block."""
        return [(*pair.key, run) for pair in self.layout.pairs for run in self.layout.rows[pair.key].runs]

    def given_others(self, state: State) -> tuple[Array, Array]:
        """``log p(block | the other blocks)`` of every block, and its share in the posterior; NaN where these fail.

        Parameters
        ----------
        state : State

        Returns
        -------
        (block,), (block,)
            Nats; equal without powers.
        """
        current = self.marginal.current(state)
        own = self._parts(current.design, state)
        bare = {key: self._constants(current.design, key, state) for key in current.design.pairs}
        density, share = [], []
        for participant, modality, run in self.blocks:
            key = participant, modality
            power, constant = current.design.pairs[key].power, bare[key][run]
            given = current.statistics[run]
            without = self._evidence(run, state, given, modality, own[key][run], -1.0)
            share.append(current.posteriors[run].log_evidence - without + constant)
            if power == 1.0:
                density.append(share[-1])
                continue
            # Its part of D, h and c is proportional to its power.
            seen = self._evidence(run, state, given, modality, own[key][run], 1.0 / power - 1.0)
            density.append(seen - without + constant / power)
        return np.array(density), np.array(share)

    def _evidence(
        self,
        run: str,
        state: State,
        given: Mapping[str, GroupStatistics],
        modality: str,
        own: tuple[Array, Array],
        times: float,
    ) -> float:
        """Log evidence of a run with a part of D and h of one modality added some times."""
        whole = given[modality]
        changed = replace(
            whole, precision=whole.precision + times * own[0], information=whole.information + times * own[1]
        )
        return self.marginal.posterior(run, state, {**given, modality: changed}).log_evidence

    def log_likelihood(self, state: State) -> float:
        """``log p(all blocks)``, nats."""
        return self.marginal.current(state).log_likelihood

    def _parts(self, design: Design, state: State) -> dict[Key, dict[str, tuple[Array, Array]]]:
        """What each block adds to D (class, K, K) and h (node, K), by pair and run."""
        size, out = self.specification.n_factors, dict[Key, dict[str, tuple[Array, Array]]]()
        for key, pair in design.pairs.items():
            weight = pair.power / state.noise[key]
            grams = pair.row_grams(state.rows[key])
            entries = pair.information(state.rows[key], grams) * weight
            out[key] = {}
            for run, (entry, node) in pair.nodes.items():
                classes = self.layout.classes[run, key[1]]
                columns = classes.columns[key[0]]
                precision = np.tensordot(classes.presence[:, columns], grams[:, :size, :size] * weight, 1)
                information = np.zeros((len(classes.index), size))
                information[node] = entries[entry]
                out[key][run] = precision, information
        return out

    def _constants(self, design: Design, key: Key, state: State) -> Mapping[str, float]:
        """The log density of each run of a pair without the latents."""
        pair = design.pairs[key]
        bare = np.zeros((len(pair.values), state.rows[key].shape[1]))
        bare[:, -pair.offsets.shape[1] :] = pair.offsets
        return design.conditional(key, bare, state.rows[key], state.noise[key])
