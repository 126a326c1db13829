"""Sums over the observations of a modality in JAX, what `msrm.gp.pair_likelihood` is in NumPy (DESIGN 3.1).

Participants whose data have the same shape are stacked and treated at once, for an accelerator's time goes into the
number of kernels. Entries are gathered into nodes by precomputed indices, never scattered: sums have one order, so
results repeat to the last bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from msrm.gp.chain import in_slots
from msrm.gp.data import NodeLayout
from msrm.gp.jax_statespace import NodeStatistics
from msrm.gp.pair_likelihood import PairLikelihood
from msrm.gp.parameters import Specification

__all__ = ["ModalitySums", "timescale_coefficients"]

_LOG_TWO_PI = float(np.log(2.0 * np.pi))
Data = dict[str, Any]


def timescale_coefficients(gaps: Array, timescale: Any) -> tuple[Array, Array]:
    """Weights (..., 2) of a row and its previous one for Ornstein-Uhlenbeck residuals, and ``log s^2`` (...,).

    The traced twin of `msrm.gp.terms.OrnsteinUhlenbeck`; (1, 0) and 0 where the gap is 0.
    """
    follows = gaps > 0.0
    scaled = jnp.where(follows, gaps, 1.0) / timescale
    spread = jnp.where(follows, jnp.sqrt(-jnp.expm1(-2.0 * scaled)), 1.0)
    previous = jnp.where(follows, -jnp.exp(-scaled) / spread, 0.0)
    return jnp.stack([1.0 / spread, previous], -1), 2.0 * jnp.log(spread)


@dataclass(frozen=True)
class _Stack:
    """Pairs of one shape: their names and what is static.

    Attributes
    ----------
    names : tuple of str
        ``participant/modality``.
    plain : bool
        Whether entries are the rows in order.
    whole : bool
        Whether every entry has every coordinate.
    run_offsets : tuple of tuple of str
        Names of each pair's run offsets, empty where there are none.
    """

    names: tuple[str, ...]
    plain: bool
    whole: bool
    run_offsets: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ModalitySums:
    """The observations of one modality.

    Attributes
    ----------
    modality : str
    power : float
    timescale : float or None
        Of Ornstein-Uhlenbeck residuals where it is fixed; None where it is a parameter or residuals are white.
    differenced : bool
    stacks : tuple
    """

    modality: str
    power: float
    timescale: float | None
    differenced: bool
    stacks: tuple[_Stack, ...]

    @classmethod
    def of(
        cls, specification: Specification, nodes: NodeLayout, terms: Sequence[PairLikelihood], modality: str
    ) -> tuple["ModalitySums", Data]:
        """The sums of a modality's pairs and the arrays they run over."""
        stacked: dict[Any, list[PairLikelihood]] = {}
        for one in terms:
            runs = len(one.run_offset_names)
            shape = len(one.pair.times), len(one.rows.current), one.pair.n_coordinates, runs
            stacked.setdefault((*shape, one.rows.plain, one.rows.complete), []).append(one)
        residual = specification.residual(modality)
        made = cls(
            modality,
            specification.power(modality),
            residual.start if residual.differenced and residual.free is None else None,
            residual.differenced,
            tuple(
                _Stack(
                    tuple(one.name for one in group),
                    group[0].rows.plain,
                    group[0].rows.complete,
                    tuple(tuple(one.run_offset_names.values()) for one in group),
                )
                for group in stacked.values()
            ),
        )
        widths = [max(len(one.pair.patterns) for one in group) for group in stacked.values()]
        ordered = [(one, width) for group, width in zip(stacked.values(), widths, strict=True) for one in group]
        data = {
            "stacks": [
                _stack_data(group, width, residual.differenced)
                for group, width in zip(stacked.values(), widths, strict=True)
            ],
            "gaps": np.concatenate([gap for (_, name), gap in nodes.gaps.items() if name == modality]),
            **_node_data(nodes, ordered, modality),
        }
        return made, jax.device_put(data)

    def __call__(self, data: Data, parameters: Mapping[str, Array]) -> tuple[NodeStatistics, Array]:
        """What the data say of the modality's nodes, and ``-c / 2`` over its scalars."""
        timescale = parameters.get(f"residual_timescale/{self.modality}", self.timescale)
        information, grams, constant = [], [], jnp.zeros(())
        for stack, arrays in zip(self.stacks, data["stacks"], strict=True):
            loading = jnp.stack([parameters[f"loading/{name}"] for name in stack.names])
            noise = jnp.stack([parameters[f"noise/{name}"] for name in stack.names])
            entries, logs = self._entries(stack, arrays, parameters, timescale)
            scale = self.power / noise
            information.append(scale[:, None, None] * (entries @ loading))
            grams.append(scale[:, None, None, None] * _pattern_grams(loading, arrays["pattern"]))
            scalars = arrays["counts"].sum(-1) * (_LOG_TWO_PI + jnp.log(noise)) + (arrays["counts"] * logs).sum(-1)
            constant -= 0.5 * (scale * (entries**2).sum((1, 2)) + self.power * scalars).sum()
        precision = jnp.tensordot(data["presence"], _joined(grams), 1)
        summed = jnp.take(_joined(information), data["entry"], axis=0, mode="fill", fill_value=0.0).sum(1)
        coefficients = timescale_coefficients(data["gaps"], timescale)[0] if self.differenced else None
        return NodeStatistics(precision, summed, coefficients), constant

    def _entries(
        self, stack: _Stack, arrays: Data, parameters: Mapping[str, Array], timescale: Any
    ) -> tuple[Array, Array]:
        """Whitened entries (pair, entry, coordinate), zero where missing, and log variances (pair, entry)."""
        rows = arrays["values"] - jnp.stack([parameters[f"offset/{name}"] for name in stack.names])[:, None]
        if any(stack.run_offsets):
            offsets = jnp.stack([jnp.stack([parameters[name] for name in names]) for names in stack.run_offsets])
            rows = rows - arrays["run"] @ offsets
        logs, entries = jnp.zeros(arrays["counts"].shape), rows
        if not stack.plain:
            entries = jnp.take_along_axis(rows, arrays["current"][..., None], axis=1)
        if self.differenced:
            weights, logs = timescale_coefficients(arrays["gaps"], timescale)
            previous = jnp.take_along_axis(rows, arrays["previous"][..., None], axis=1)
            entries = weights[..., :1] * entries + weights[..., 1:] * previous
        return entries if stack.whole else entries * arrays["mask"], logs


def _joined(parts: Sequence[Array]) -> Array:
    """Parts (pair, item, ...) end to end, (item, ...)."""
    flat = [part.reshape(-1, *part.shape[2:]) for part in parts]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def _pattern_grams(loading: Array, pattern: Array | None) -> Array:
    """Sum of w w' over the coordinates of each mask pattern, (pair, pattern, K, K); ``pattern`` None for one."""
    if pattern is None:
        return (jnp.swapaxes(loading, 1, 2) @ loading)[:, None]
    return jnp.einsum("gpf,gfk,gfl->gpkl", pattern, loading, loading)


def _stack_data(group: Sequence[PairLikelihood], patterns: int, differenced: bool) -> Data:
    """Arrays of pairs of one shape, stacked along the first axis."""

    def stack(of: Any) -> np.ndarray:
        return np.stack([of(one) for one in group])

    data: Data = {
        "values": stack(lambda one: np.concatenate([block for _, block in one.pair], axis=1)),
        "counts": stack(lambda one: one.counts.astype(float)),
        "pattern": None,
    }
    if patterns > 1:
        # A pattern of null features alone has no coordinate: its sum is zero.
        data["pattern"] = stack(lambda one: (np.arange(patterns)[:, None] == one.pair.pattern).astype(float))
    if not group[0].rows.plain:
        data["current"] = stack(lambda one: one.rows.current)
    if differenced:
        data |= {"previous": stack(lambda one: one.rows.previous), "gaps": stack(lambda one: one.gaps)}
    if not group[0].rows.complete:
        data["mask"] = stack(lambda one: one.mask.astype(float))
    if group[0].run_offset_names:
        data["run"] = stack(_run_marks)
    return data


def _run_marks(one: PairLikelihood) -> np.ndarray:
    """Which run a row belongs to, (row, run) of 0 and 1."""
    marks = np.zeros((len(one.pair.times), len(one.run_offset_names)))
    for place, run in enumerate(one.run_offset_names):
        marks[one.pair.rows[run], place] = 1.0
    return marks


def _node_data(nodes: NodeLayout, ordered: Sequence[tuple[PairLikelihood, int]], modality: str) -> Data:
    """Which mask patterns and which entries each node of all runs has.

    ``presence`` (node, pattern), or (1, pattern) where all nodes have the same; ``entry`` (node, multiplicity), filled
    up with the number of entries. Patterns and entries are those of all pairs in their order, one after the other.
    """
    first_node = {run: 0 for (run, name) in nodes.classes if name == modality}
    total = 0
    for run in first_node:
        first_node[run], total = total, total + len(nodes.classes[run, modality].index)
    presence = np.zeros((total, sum(width for _, width in ordered)))
    node, entry, patterns, entries = [], [], 0, 0
    for one, width in ordered:
        for run, (own, place) in one.rows.runs.items():
            classes = nodes.classes[run, modality]
            marks = classes.presence[classes.index][:, classes.columns[one.pair.participant]]
            span = slice(first_node[run], first_node[run] + len(marks))
            presence[span, patterns : patterns + marks.shape[1]] = marks
            node.append(place + first_node[run])
            entry.append(own + entries)
        patterns, entries = patterns + width, entries + len(one.rows.current)
    slots = in_slots(np.concatenate(node), total)
    gather = np.concatenate([*entry, [entries]])[slots]
    same = bool((presence == presence[0]).all())
    return {"entry": gather, "presence": presence[:1] if same else presence}
