"""What the compiled Gibbs sampler keeps of the data: pairs of one shape stacked, the nodes they meet, sums over them.

The traced twin of `msrm.gp.gibbs.design` for complete rows and white residuals (DESIGN 3.1, 3.2, 5). A stack holds
``rows (pair, coordinate, K + 1)``, loading and offset; where its pairs have null features the last K + 1 coordinates
stand for them: columns of a factor of their Gram matrix, with data that are zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from msrm.gp.chain import in_slots
from msrm.gp.data import NodeLayout
from msrm.gp.gibbs.design import Design, PairDesign
from msrm.gp.jax_statespace import NodeStatistics
from msrm.priors import LogNormal, Normal, Prior

__all__ = ["ChainState", "ModalityStacks", "Stack", "entry_squares", "log_prior", "modality_stacks"]

Data = dict[str, Any]
_LOG_TWO_PI = float(np.log(2.0 * np.pi))


class ChainState(NamedTuple):
    """Parameters of a chain.

    Attributes
    ----------
    rows : {modality: tuple of (pair, coordinate, K + 1)}
    noise : (pair,)
    responses : {modality: {name: ()}}
        Free parameters.
    """

    rows: dict[str, tuple[Array, ...]]
    noise: Array
    responses: dict[str, dict[str, Array]]


@dataclass(frozen=True)
class Stack:
    """Pairs of one shape.

    Attributes
    ----------
    places : tuple of int
        Of the pairs among all.
    own : int
        Coordinates with data.
    null : tuple of int
        Null features of each pair.
    power : float
    """

    places: tuple[int, ...]
    own: int
    null: tuple[int, ...]
    power: float

    @property
    def has_null(self) -> bool:
        """Whether the last coordinates stand for null features."""
        return any(self.null)

    def weights(self, noise: Array) -> Array:
        """power / v of each pair, (pair,)."""
        return self.power / noise[jnp.asarray(self.places)]


@dataclass(frozen=True)
class ModalityStacks:
    """The stacks of one modality.

    Attributes
    ----------
    stacks : tuple of Stack
    feature_rows : int
        Rows of all pairs, null ones counted: what a scale of the loadings acts on.
    """

    stacks: tuple[Stack, ...]
    feature_rows: int

    def statistics(self, data: Data, rows: Sequence[Array], noise: Array) -> NodeStatistics:
        """D and h of the modality's nodes (DESIGN 3.1)."""
        information, grams = [], []
        for stack, given, one in zip(self.stacks, data["stacks"], rows, strict=True):
            loading, offset, weight = one[..., :-1], one[..., -1], stack.weights(noise)
            crossed = (offset[..., None] * loading).sum(1)
            pulled = given["values"] @ loading[:, : stack.own] - crossed[:, None]
            information.append((weight[:, None, None] * pulled).reshape(-1, pulled.shape[-1]))
            grams.append(weight[:, None, None] * (jnp.swapaxes(loading, 1, 2) @ loading))
        precision = jnp.tensordot(data["presence"], jnp.concatenate(grams), 1)
        every = jnp.concatenate(information)
        return NodeStatistics(precision, jnp.take(every, data["entry"], axis=0, mode="fill", fill_value=0.0).sum(1))

    def constant(self, data: Data, rows: Sequence[Array], noise: Array) -> Array:
        """``-c / 2`` of DESIGN 3.1: the log likelihood without the latents."""
        total = jnp.zeros(())
        for stack, given, one in zip(self.stacks, data["stacks"], rows, strict=True):
            squares = ((given["values"] - one[:, None, : stack.own, -1]) ** 2).sum((1, 2))
            squares = squares + given["values"].shape[1] * (one[:, stack.own :, -1] ** 2).sum(1)
            total = total + self._log_density(stack, given, squares[:, None], noise).sum()
        return total

    def conditional(self, data: Data, rows: Sequence[Array], noise: Array, functionals: Array) -> list[Array]:
        """Log likelihood given the latents, (pair, run) of each stack, 0 in runs that a pair lacks."""
        return [
            self._log_density(stack, given, _by_run(given, entry_squares(stack, given, one, functionals)), noise)
            for stack, given, one in zip(self.stacks, data["stacks"], rows, strict=True)
        ]

    @staticmethod
    def _log_density(stack: Stack, given: Data, squares: Array, noise: Array) -> Array:
        """Of sums of squares (pair, run) or, over all runs, (pair, 1)."""
        scalars = (
            given["scalars"] if squares.shape[1] == given["scalars"].shape[1] else given["scalars"].sum(1)[:, None]
        )
        logs = jnp.log(noise[jnp.asarray(stack.places)])[:, None] + _LOG_TWO_PI
        return -0.5 * (stack.weights(noise)[:, None] * squares + stack.power * scalars * logs)


def design_matrix(given: Data, functionals: Array) -> Array:
    """x of every entry, (pair, entry, K + 1), from the modality's functionals (node, K)."""
    seen = functionals[given["node"]]
    return jnp.concatenate([seen, jnp.ones((*seen.shape[:-1], 1))], -1)


def entry_squares(stack: Stack, given: Data, rows: Array, functionals: Array) -> Array:
    """Squared residuals of every entry, summed over raw features, (pair, entry)."""
    matrix = design_matrix(given, functionals)
    squares = ((given["values"] - matrix @ jnp.swapaxes(rows[:, : stack.own], 1, 2)) ** 2).sum(-1)
    return squares + ((matrix @ jnp.swapaxes(rows[:, stack.own :], 1, 2)) ** 2).sum(-1) if stack.has_null else squares


def _by_run(given: Data, values: Array) -> Array:
    """Sums (pair, run) of values (pair, entry)."""
    return jnp.einsum("pe,per->pr", values, given["run"])


def modality_stacks(design: Design, layout: NodeLayout) -> tuple[dict[str, ModalityStacks], dict[str, Data]]:
    """All pairs by modality and shape, and the arrays they run over."""
    made, data = {}, {}
    for modality in design.modalities:
        grouped: dict[Any, list[tuple[int, PairDesign]]] = {}
        for place, (key, pair) in enumerate(design.pairs.items()):
            if key[1] == modality:
                own, null = pair.pair.n_coordinates, int(pair.pair.null_counts.sum())
                grouped.setdefault((len(pair.values), own, null > 0), []).append((place, pair))
        stacks = tuple(
            Stack(
                tuple(place for place, _ in group),
                own,
                tuple(int(pair.pair.null_counts.sum()) for _, pair in group),
                group[0][1].power,
            )
            for (_, own, _), group in grouped.items()
        )
        ordered = [pair for group in grouped.values() for _, pair in group]
        first, total = _first_nodes(layout, modality)
        data[modality] = {
            "stacks": [_stack_data([pair for _, pair in group], first, layout) for group in grouped.values()],
            **_node_data(ordered, first, total, layout, modality),
        }
        made[modality] = ModalityStacks(stacks, design.feature_rows[modality])
    return made, data


def _first_nodes(layout: NodeLayout, modality: str) -> tuple[dict[str, int], int]:
    """Place of each run's first node among those of all runs, and their number."""
    first, total = {}, 0
    for run, groups in layout.groups.items():
        if modality in groups:
            first[run], total = total, total + groups[modality].n_nodes
    return first, total


def _stack_data(group: Sequence[PairDesign], first: Mapping[str, int], layout: NodeLayout) -> Data:
    runs = list(layout.groups)
    node, mark = (
        np.zeros((len(group), len(group[0].values)), int),
        np.zeros((len(group), len(group[0].values), len(runs))),
    )
    scalars = np.zeros((len(group), len(runs)))
    for place, pair in enumerate(group):
        for run, (entry, of) in pair.nodes.items():
            node[place, entry] = of + first[run]
            mark[place, entry, runs.index(run)] = 1.0
            scalars[place, runs.index(run)] = pair.scalars[run]
    values = np.stack([pair.values[:, : pair.pair.n_coordinates] for pair in group])
    null = [int(pair.pair.null_counts.sum()) for pair in group]
    given = {"values": values, "node": node, "run": mark, "scalars": scalars, "null": np.array(null, float)}
    return {name: jnp.asarray(value) for name, value in given.items()}


def _node_data(
    ordered: Sequence[PairDesign], first: Mapping[str, int], total: int, layout: NodeLayout, modality: str
) -> Data:
    """Which pairs and which of their entries each node has; nodes without differences share one row of `presence`."""
    presence, node, entry, before = np.zeros((total, len(ordered))), [], [], 0
    for place, pair in enumerate(ordered):
        for run, (own, of) in pair.nodes.items():
            classes = layout.classes[run, modality]
            marks = classes.presence[classes.index][:, classes.columns[pair.pair.participant]]
            presence[first[run] : first[run] + len(marks), place] = marks[:, 0]
            node.append(of + first[run])
            entry.append(own + before)
        before += len(pair.values)
    slots = in_slots(np.concatenate(node), total)
    gather = np.concatenate([*entry, [before]])[slots]
    same = bool((presence == presence[0]).all())
    return {"entry": jnp.asarray(gather), "presence": jnp.asarray(presence[:1] if same else presence)}


def log_prior(prior: Prior, value: Array) -> Array:
    """Log density up to a constant, minus infinity outside the bounds."""
    inside = (value > prior.lower) & (value < prior.upper)
    if isinstance(prior, LogNormal):
        safe = jnp.log(jnp.where(inside, value, 1.0))
        found = -0.5 * ((safe - prior.mean) / prior.sd) ** 2 - safe
    elif isinstance(prior, Normal):
        found = -0.5 * ((value - prior.mean) / prior.sd) ** 2
    else:
        found = jnp.zeros_like(value)
    return jnp.where(inside, found, -jnp.inf)
