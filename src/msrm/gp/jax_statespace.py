"""The state-space likelihood in JAX: all runs as one chain of blocks of grid points, compiled whole (DESIGN 3.3, 4, 7).

The grids, weights and residual variances of `msrm.gp.statespace`, assembled into the block tridiagonal system of
`msrm.gp.blocks` in fixed shapes: new parameters never compile anything again. Blocks are factor-major, runs follow each
other without a coupling. Every node adds ``(a a') (x) D`` to the two blocks of its window, all nodes of a window in
three matrix products. Supports may grow by the ``room`` given at the start; beyond it the log evidence is NaN and
`BlockSystem.fits` is False.

On a CPU the NumPy band is faster and compiles nothing. This backend is for accelerators, for samplers that stay
compiled and for users' own gradients.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from msrm.gp.blocks import Solver, log_evidence, pad, pad_identity
from msrm.gp.chain import Chain, chain_of, runs_of
from msrm.gp.cholesky import DIAGNOSTICS
from msrm.gp.extrapolation import Extrapolated
from msrm.gp.jax_cholesky import log_determinant_and_solve
from msrm.gp.jax_matern import prior_blocks
from msrm.gp.jax_rows import Data, Rows, WindowRows, window_rows
from msrm.gp.statespace import StateSpace

__all__ = ["STATUS", "BlockSystem", "ExtrapolatedChain", "NodeStatistics", "StateSpaceChain"]

STATUS = (
    *DIAGNOSTICS,
    "a response reaches beyond the windows that were compiled; make the likelihood again at these parameters, or with "
    "more room",
)


class NodeStatistics(NamedTuple):
    """What the data say of one modality's nodes, those of all runs in turn (traced, or about to be).

    Attributes
    ----------
    precision : (node, K, K) or (1, K, K)
        D of each node, or one for all.
    information : (node, K)
        h.
    coefficients : (node, 2) or None
        Of nodes that are differences.
    """

    precision: Array | np.ndarray
    information: Array | np.ndarray
    coefficients: Array | np.ndarray | None = None


class BlockSystem(NamedTuple):
    """Posterior precision and information of the states, block by block (traced).

    Attributes
    ----------
    diagonal : (block, b, b)
    lower : (block - 1, b, b)
    right : (block, b)
    constant : ()
        Added to `msrm.gp.blocks.log_evidence` it makes the log evidence.
    rows : {modality: (block, slot, 2 b / K)}
        a of the node in each slot over both blocks of the window.
    residual : {modality: (block, slot)}
        rho of the node in each slot, where it is used.
    nodes : {modality: (block, slot)}
        Which node a slot holds, among those of all runs; their number where it is empty.
    fits : () bool
        Whether every node lies in its window.
    """

    diagonal: Array
    lower: Array
    right: Array
    constant: Array
    rows: dict[str, Array]
    residual: dict[str, Array]
    nodes: dict[str, Array]
    fits: Array


class StateSpaceChain:
    """The state-space backend of all runs, for tracing.

    Parameters
    ----------
    backend : StateSpace
        Grids, spacing, Matern order and use of residual variances.
    solver : Solver
        `msrm.gp.cyclic.Parallel` or `msrm.gp.blocks.Sequential`.
    length_scale : float or None
        Seconds where it is fixed, None where it is a parameter.
    values : {modality: {name: float}}, optional
        Where a search or chain starts; the responses' starts by default.
    room : float
        How much longer than there supports may become; blocks are larger by as much.
    least_points : int
        Grid points that a block has at least.

    Attributes
    ----------
    chain : Chain
    data : {modality: {name: array}}
        Arrays of the recording's size, passed to `system` so that compiled code does not hold them.
    counts : {modality: int}
        Nodes of all runs.
    """

    def __init__(
        self,
        backend: StateSpace,
        solver: Solver,
        *,
        length_scale: float | None,
        values: Mapping[str, Mapping[str, float]] | None = None,
        room: float = 1.25,
        least_points: int = 1,
    ) -> None:
        self.solver, self.matern, self.n_factors, self.length_scale = (
            solver, backend.matern, backend.n_factors, length_scale
        )  # fmt: skip
        self.chain = chain_of(backend, values, room, least_points=least_points)
        modalities = list(dict.fromkeys(name for groups in backend.groups.values() for name in groups))
        self.rows: dict[str, Rows] = {}
        self.data: dict[str, Data] = {}
        for modality in modalities:
            self.rows[modality], data = window_rows(backend, self.chain, modality, length_scale)
            self.data[modality] = jax.device_put(data)
        self.counts = {m: sum(group.n_nodes for _, _, group in runs_of(backend, m)) for m in modalities}

    @property
    def geometry(self) -> tuple[Chain, ...]:
        """Blocks: what a trace follows from beside the backend."""
        return (self.chain,)

    @property
    def order(self) -> int:
        """Order of a block."""
        return self.n_factors * self.matern.dimension * self.chain.points

    def log_evidence(
        self,
        data: Mapping[str, Data],
        values: Mapping[str, Mapping[str, Any]],
        length_scale: Any,
        statistics: Mapping[str, NodeStatistics],
    ) -> tuple[Array, Array]:
        """Log evidence of all runs, differentiable in everything but ``data``, and why it is NaN where it is.

        Parameters
        ----------
        data : {modality: {name: array}}
            The attribute `data`.
        values : {modality: {name: ()}}
            Free response parameters.
        length_scale : () or None
            Seconds, where it is a parameter.
        statistics : {modality: NodeStatistics}

        Returns
        -------
        log_evidence : ()
        status : () int
            Index into `STATUS`.
        """
        system = self.system(data, values, length_scale, statistics)
        value = log_evidence(self.solver, system.diagonal, system.lower, system.right) + system.constant
        return _judged(value, system.right, system.fits, statistics)

    def system(
        self,
        data: Mapping[str, Data],
        values: Mapping[str, Mapping[str, Any]],
        length_scale: Any,
        statistics: Mapping[str, NodeStatistics],
    ) -> BlockSystem:
        """The states' posterior precision and information; arguments as in `log_evidence`."""
        return self.assembled(self.windows(data, values, length_scale), length_scale, statistics)

    def windows(
        self, data: Mapping[str, Data], values: Mapping[str, Mapping[str, Any]], length_scale: Any
    ) -> dict[str, WindowRows]:
        """Weights of every modality's nodes in their windows; arguments as in `log_evidence`."""
        x = self._x(length_scale)
        return {modality: of(data[modality], values.get(modality, {}), x) for modality, of in self.rows.items()}

    def _x(self, length_scale: Any) -> Any:
        """The scaled spacing, a plain number where the length scale is fixed: what follows from it is NumPy's work."""
        length_scale = self.length_scale if length_scale is None else length_scale
        return self.matern.rate(length_scale) * self.chain.step

    def assembled(
        self, windows: Mapping[str, WindowRows], length_scale: Any, statistics: Mapping[str, NodeStatistics]
    ) -> BlockSystem:
        """The system of nodes whose windows are known."""
        half, size = self.matern.dimension * self.chain.points, self.n_factors
        diagonal, lower, constant = self._prior(self._x(length_scale))
        precisions, informations, weights = [], [], []
        rows, residual, nodes, fits = {}, {}, {}, jnp.asarray(True)
        for modality, made in windows.items():
            one, precision, information, extra = _seen(made, statistics[modality])
            rows[modality], nodes[modality], fits = one, made.nodes, fits & made.fits
            if made.residual is not None:
                residual[modality] = made.residual
            weights.append(one)
            precisions.append(precision)
            informations.append(information)
            constant = constant + extra
        a, d = jnp.concatenate(weights, 1), jnp.concatenate(precisions, 1)
        early, late = a[..., :half], a[..., half:]

        def added(left: Array, right: Array) -> Array:
            weighted = d[: len(left), ..., None] * left[:, :, None, None, :]
            return jnp.einsum("sjklx,sjy->skxly", weighted, right).reshape(-1, size * half, size * half)

        diagonal = diagonal + added(early, early) + pad(added(late[:-1], late[:-1]), 1, 0)
        lower = lower + added(late[:-1], early[:-1])
        h = jnp.einsum("sjk,sjx->skx", jnp.concatenate(informations, 1), a)
        right = h[..., :half] + pad(h[:-1, :, half:], 1, 0)
        return BlockSystem(diagonal, lower, right.reshape(-1, size * half), constant, rows, residual, nodes, fits)

    def _prior(self, x: Any) -> tuple[Array, Array, Array]:
        """Prior precision of the states in blocks, and half its log determinant."""
        prior = jax.tree.map(jnp.asarray, prior_blocks(self.matern, x, self.chain.points))
        first, last = (mark[:, None, None] for mark in self.chain.ends)
        within = prior.within + first * prior.first + last * prior.last
        below = jnp.where(last[:-1], 0.0, prior.below)

        def all_factors(blocks: Array) -> Array:
            each = jnp.eye(self.n_factors)[:, None, :, None] * blocks[:, None, :, None, :]
            return each.reshape(-1, self.order, self.order)

        runs = len(self.chain.blocks)
        steps = self.chain.count * self.chain.points - runs
        constant = 0.5 * self.n_factors * (steps * prior.log_step + runs * prior.log_start)
        return all_factors(within), all_factors(below), constant


class ExtrapolatedChain:
    """Two grids of one recording, and the log evidence extrapolated to a vanishing spacing (DESIGN 3.3).

    The traced twin of `msrm.gp.extrapolation.Extrapolated`. Both systems have blocks of one order and are solved as
    one batch: an accelerator, whose time goes into the number of kernels, takes hardly longer than for the finer one.

    Parameters
    ----------
    backend : Extrapolated
    solver, length_scale, values, room
        As in `StateSpaceChain`.

    Attributes
    ----------
    chain : Chain
        Of the finer grid.
    data : {"fine": ..., "coarse": ...}
    counts : {modality: int}
    """

    def __init__(
        self,
        backend: Extrapolated,
        solver: Solver,
        *,
        length_scale: float | None,
        values: Mapping[str, Mapping[str, float]] | None = None,
        room: float = 1.25,
    ) -> None:
        self.solver, self.weight = solver, backend.weight
        self.fine = StateSpaceChain(backend.fine, solver, length_scale=length_scale, values=values, room=room)
        self.coarse = StateSpaceChain(
            backend.coarse,
            solver,
            length_scale=length_scale,
            values=values,
            room=room,
            least_points=self.fine.chain.points,
        )
        self.chain, self.counts = self.fine.chain, self.fine.counts
        self.data = {"fine": self.fine.data, "coarse": self.coarse.data}

    @property
    def geometry(self) -> tuple[Chain, ...]:
        """Blocks of both grids."""
        return self.fine.chain, self.coarse.chain

    @property
    def order(self) -> int:
        """Order of a block."""
        return self.fine.order

    def log_evidence(
        self,
        data: Mapping[str, Mapping[str, Data]],
        values: Mapping[str, Mapping[str, Any]],
        length_scale: Any,
        statistics: Mapping[str, NodeStatistics],
    ) -> tuple[Array, Array]:
        """The extrapolated log evidence and why it is NaN where it is; arguments as in `StateSpaceChain`."""
        systems = [
            chain.system(data[name], values, length_scale, statistics)
            for name, chain in (("fine", self.fine), ("coarse", self.coarse))
        ]
        count = max(self.fine.chain.count, self.coarse.chain.count)

        def both(name: str, filled: Any) -> Array:
            return jnp.stack([filled(getattr(system, name)) for system in systems])

        each = jax.vmap(partial(log_evidence, self.solver))(
            both("diagonal", lambda blocks: pad_identity(blocks, count)),
            both("lower", lambda blocks: pad(blocks, 0, count - 1 - len(blocks))),
            both("right", lambda blocks: pad(blocks, 0, count - len(blocks))),
        )
        fine, coarse = (value + system.constant for value, system in zip(each, systems, strict=True))
        value = fine + (self.weight - 1.0) * (fine - coarse)
        return _judged(value, systems[0].right, systems[0].fits & systems[1].fits, statistics)


def _judged(value: Array, right: Array, fits: Array, statistics: Mapping[str, NodeStatistics]) -> tuple[Array, Array]:
    """A log evidence, NaN where nodes leave their windows, and its status."""
    finite = jnp.isfinite(right).all()
    for one in statistics.values():
        finite = finite & jnp.isfinite(one.precision).all()
    status = jnp.where(jnp.isfinite(value), 0, jnp.where(finite, 2, 1))
    return jnp.where(fits, value, jnp.nan), jnp.where(fits, status, 3)


def _seen(made: WindowRows, statistics: NodeStatistics) -> tuple[Array, Array, Array, Array]:
    """Rows, D and h of the nodes in their slots, shrunk by residual variances, and what these add to the evidence."""

    def taken(values: Any) -> Array:
        return jnp.take(values, made.nodes, axis=0, mode="fill", fill_value=0.0)

    information = taken(statistics.information)
    count, size = statistics.information.shape
    if statistics.precision.shape[0] == count:
        precision = taken(statistics.precision)
    else:
        precision = jnp.where((made.nodes < count)[..., None, None], statistics.precision[0], 0.0)
    rows = made.terms[:, :, 0]
    if statistics.coefficients is not None:
        rows = (taken(statistics.coefficients)[..., None] * made.terms).sum(2)
    if made.residual is None:
        return rows, precision, information, jnp.zeros(())
    rho = made.residual[..., None, None]
    sides = jnp.concatenate([precision, information[..., None]], -1)
    logs, shrunk = log_determinant_and_solve(jnp.eye(size) + rho * precision, sides)
    extra = 0.5 * (rho[..., 0] * information * shrunk[..., size]).sum() - 0.5 * logs.sum()
    shrunk_precision = (shrunk[..., :size] + jnp.swapaxes(shrunk[..., :size], -1, -2)) / 2
    return rows, shrunk_precision, shrunk[..., size], extra
