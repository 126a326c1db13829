"""Densities of blocks given the other blocks, at one setting of the parameters (DESIGN 5).

A block is a participant's modality in a run. With D, h and c of DESIGN 3.1 a sum over blocks, leaving one out subtracts
its part: ``log p(block | others) = log p(all) - log p(others)``, both with the latents integrated out.
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

    def given_others(self, state: State) -> Array:
        """``log p(block | the other blocks)`` of every block, nats, (block,); NaN where a factorization fails."""
        current = self.marginal.current(state)
        own = self._parts(current.design, state)
        bare = {key: self._constants(current.design, key, state) for key in current.design.pairs}
        out = []
        for participant, modality, run in self.blocks:
            key = participant, modality
            others = {name: statistics for name, statistics in current.statistics[run].items()}
            whole, (precision, information) = others[modality], own[key][run]
            others[modality] = replace(
                whole, precision=whole.precision - precision, information=whole.information - information
            )
            without = self.marginal.posterior(run, state, others).log_evidence
            out.append(current.posteriors[run].log_evidence - without + bare[key][run])
        return np.array(out)

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
