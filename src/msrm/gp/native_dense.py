"""The dense backend on a device: node covariances from tables over distinct lags, the rest in JAX (DESIGN 4).

`msrm.gp.covariance` gives the covariance of every pair of responses at their distinct lags and its slopes, on the host:
a few thousand numbers. Here they become matrices, and `msrm.gp.jax_dense` the log evidence and its derivatives, without
leaving the device. The guard decides before anything is allocated whether the gradient runs whole, by panels, or not.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from msrm.gp.cholesky import DIAGNOSTICS
from msrm.gp.covariance import cross_covariance
from msrm.gp.dense import Dense, distinct_lags
from msrm.gp.jax_cholesky import device_memory, guard
from msrm.gp.jax_dense import dense_evidence, dense_evidence_by_panels
from msrm.gp.programs import Program
from msrm.nodes import Evidence, GroupStatistics, NodeGroup

__all__ = ["NativeDense"]

Pair = tuple[str, str]
_COPIES = 8.0  # matrices of the order of M alive at once where the gradient runs whole
_PANEL_COPIES = 3.5  # the same by panels
_PANEL = 512  # nodes of a panel


class NativeDense:
    """The dense backend in JAX (a `msrm.nodes.Backend`).

    Parameters
    ----------
    backend : Dense
        Node groups and Matern order.
    """

    def __init__(self, backend: Dense) -> None:
        self.backend = backend
        self._programs: dict[Any, Program] = {}
        self._lags: dict[str, dict[Pair, tuple[np.ndarray, Array]]] = {}
        for run, groups in backend.groups.items():
            names, lags = list(groups), {}
            for place, a in enumerate(names):
                for b in names[place:]:
                    distinct, index = distinct_lags(groups[a].times, groups[b].times)
                    lags[a, b] = distinct, jax.device_put(index)
            self._lags[run] = lags

    def evidence(
        self,
        run: str,
        response_values: Mapping[str, Mapping[str, float]],
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
        gradient: bool = True,
    ) -> Evidence:
        """Log evidence of one run and its derivatives (`msrm.nodes.Backend`).

        Raises
        ------
        MemoryError
            If the device cannot hold the factorization; the message names ``"statespace"``.
        """
        groups = self.backend.groups[run]
        order = self.backend.n_factors * sum(group.n_nodes for group in groups.values())
        panel = _panel_of(order, self.backend.n_factors, gradient)
        tables, slopes = {}, {}
        for (a, b), (lags, _) in self._lags[run].items():
            tables[a, b], slopes[a, b] = cross_covariance(
                groups[a].response,
                response_values.get(a),
                groups[b].response,
                response_values.get(b),
                lags,
                length_scale=length_scale,
                matern=self.backend.matern,
                gradient=gradient,
            )
        given = {name: _given(groups[name], one) for name, one in statistics.items() if name in groups}
        index = {pair: place for pair, (_, place) in self._lags[run].items()}
        made = self._program(tuple(groups), gradient, panel)(index, tables, slopes, given)
        value = float(made["value"])
        if not np.isfinite(value):
            finite = all(np.isfinite(table).all() for table in tables.values())
            return Evidence.failed(DIAGNOSTICS[2 if finite else 1])
        return self._collected(run, jax.tree.map(np.asarray, made)) if gradient else Evidence(value)

    def _program(self, names: tuple[str, ...], gradient: bool, panel: int | None) -> Program:
        made_of = names, gradient, panel
        if made_of not in self._programs:
            self._programs[made_of] = Program(partial(_evaluated, *made_of), made_of)
        return self._programs[made_of]

    def posterior(
        self,
        run: str,
        response_values: Mapping[str, Mapping[str, float]],
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
    ) -> Any:
        """The latent of one run given the data, on the host (`msrm.gp.dense.Dense`)."""
        return self.backend.posterior(run, response_values, length_scale, statistics)

    def _collected(self, run: str, made: dict[str, Any]) -> Evidence:
        groups, by_slope = self.backend.groups[run], made["slopes"]
        slopes = {name: dict.fromkeys(group.response.free, 0.0) for name, group in groups.items()}
        length_scale = 0.0
        for (a, b), found in by_slope.items():
            for (side, parameter), slope in found.items():
                if side == "length_scale":
                    length_scale += float(slope)
                else:
                    slopes[a if side == "a" else b][parameter] += float(slope)
        precision = {name: one["precision"] for name, one in made["given"].items()}
        return Evidence(
            float(made["value"]),
            True,
            "",
            {name: one["information"] for name, one in made["given"].items()},
            {name: -(one + np.swapaxes(one, 1, 2)) for name, one in precision.items()},
            slopes,
            length_scale if self.backend.length_scale_slope else 0.0,
            {name: one["coefficients"] for name, one in made["given"].items() if "coefficients" in one},
        )


def _panel_of(order: int, size: int, gradient: bool) -> int | None:
    """Nodes of a panel, or None where the gradient runs whole; refuses what does not fit."""
    available, _ = device_memory()
    if not gradient or available is None or 8.0 * _COPIES * order**2 <= available:
        guard(order, copies=_COPIES if gradient else 2.0)
        return None
    guard(order, copies=_PANEL_COPIES)
    return min(_PANEL, order // size)


def _given(group: NodeGroup, one: GroupStatistics) -> dict[str, dict[str, Any]]:
    """Arrays of a group: those to differentiate, and which D and which times its nodes have."""
    slopes = {"precision": one.precision, "information": one.information}
    fixed = {"marks": (one.index[:, None] == np.arange(len(one.precision))).astype(float)}
    if group.pairs is not None and one.coefficients is not None:
        slopes["coefficients"] = one.coefficients
        fixed["pairs"] = group.pairs
    return {"slopes": slopes, "fixed": fixed}


def _rows(matrix: Array, starts: dict[str, slice], given: Any, slopes: Any) -> Array:
    """Rows over times as rows over nodes: sums of two where nodes are differences."""
    parts = []
    for name, span in starts.items():
        part = matrix[span]
        if "pairs" in given[name]["fixed"]:
            part = (slopes[name]["coefficients"][..., None] * part[given[name]["fixed"]["pairs"]]).sum(1)
        parts.append(part)
    return jnp.concatenate(parts)


def _evaluated(
    names: tuple[str, ...],
    gradient: bool,
    panel: int | None,
    index: dict[Pair, Array],
    tables: dict[Pair, Array],
    slopes: dict[Pair, dict[Pair, Array]],
    given: dict[str, Any],
) -> dict[str, Any]:
    """The log evidence and, with ``gradient``, its derivatives in tables' parameters, D, h and coefficients."""
    blocks = {pair: table[index[pair]] for pair, table in tables.items()}
    base = jnp.concatenate(
        [jnp.concatenate([blocks[a, b] if (a, b) in blocks else blocks[b, a].T for b in names], 1) for a in names]
    )
    spans, start = {}, 0
    for name in names:
        spans[name] = slice(start, start := start + blocks[name, name].shape[0])

    def nodes(base: Array, free: Any) -> tuple[Array, Array, Array]:
        covariance = _rows(_rows(base, spans, given, free).T, spans, given, free)
        precision = [jnp.tensordot(given[name]["fixed"]["marks"], free[name]["precision"], 1) for name in names]
        return covariance, jnp.concatenate(precision), jnp.concatenate([free[name]["information"] for name in names])

    free = {name: given[name]["slopes"] for name in names}
    if not gradient:
        return {"value": dense_evidence(*nodes(base, free))}
    arguments, back = jax.vjp(nodes, base, free)
    if panel is None:
        value, derivatives = jax.value_and_grad(dense_evidence, argnums=(0, 1, 2))(*arguments)
    else:
        value, *derivatives = dense_evidence_by_panels(*arguments, panel=panel)
    on_base, on_free = back(tuple(derivatives))
    by_slope: dict[Pair, dict[Pair, Array]] = {}
    for (a, b), found in slopes.items():
        part = on_base[spans[a], spans[b]] if a == b else on_base[spans[a], spans[b]] + on_base[spans[b], spans[a]].T
        by_slope[a, b] = {key: (part * slope[index[a, b]]).sum() for key, slope in found.items()}
    return {"value": value, "slopes": by_slope, "given": on_free}
