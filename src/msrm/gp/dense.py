"""The dense likelihood: the covariance of a run's nodes, factored whole (DESIGN 4). Exact; the reference for the other.

With ``D = L L'`` block diagonal, ``h = L q``, C the covariance of node functionals and ``M = I + L' (C (x) I_K) L``,

    log evidence = (q' q - q' M^-1 q - log|M|) / 2,

so that loadings of zero and D of any rank need no special case, and sharp data cancel in q, not in its square.
Derivatives in C go through ``S = L M^-1 L'`` and ``a = h - D E[g] = L M^-1 q``: d/dC = sum over factors of
(a a' - S) / 2. Other functionals with cross-covariance c have the mean ``c a`` and lose ``c S c'`` of their covariance.
Memory is five matrices of order nodes x K, time its cube.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from msrm.gp.cholesky import Factor, factorize
from msrm.gp.covariance import cross_covariance
from msrm.latent_grid import Matern, Matern32
from msrm.nodes import Evidence, GroupStatistics, NodeGroup
from msrm.responses import Response

Values = Mapping[str, Mapping[str, float]]
_LAG_DIGITS = 9  # lags closer than 1e-9 s are one lag; times are given in seconds
RANK = 1e-14  # share of a node's largest precision below which a direction is rounding
_WHITENED_TOGETHER = 64  # functionals whose covariances are taken at once


@dataclass(frozen=True, eq=False)
class Dense:
    """The dense backend: node groups by run.

    Attributes
    ----------
    groups : {run: {modality: NodeGroup}}
    n_factors : int
    matern : Matern
    length_scale_slope : bool
        Whether :class:`Evidence` carries the length scale's derivative.
    """

    groups: Mapping[str, Mapping[str, NodeGroup]]
    n_factors: int
    matern: Matern = field(default_factory=Matern32)
    length_scale_slope: bool = True

    @cached_property
    def _lags(self) -> dict[str, dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]]:
        """Distinct time differences of each pair of modalities, and which of them a pair of times has."""
        out: dict[str, dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]] = {}
        for run, groups in self.groups.items():
            names = list(groups)
            out[run] = {
                (a, b): distinct_lags(groups[a].times, groups[b].times) for i, a in enumerate(names) for b in names[i:]
            }
        return out

    def evidence(
        self,
        run: str,
        response_values: Values,
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
        gradient: bool = True,
    ) -> Evidence:
        """Log evidence of one run and its derivatives (:class:`msrm.nodes.Backend`)."""
        blocks = self._covariance(run, response_values, length_scale, gradient)
        posterior = self._posterior(run, response_values, length_scale, statistics, blocks)
        if not posterior.factor.ok or not np.isfinite(posterior.log_evidence):
            return Evidence.failed(posterior.factor.diagnostic or "the log evidence is not finite")
        size, roots, covariance, score = self.n_factors, posterior.roots, posterior.covariance, posterior.score
        mean, nodes = covariance @ score, _slices({name: group.n_nodes for name, group in self.groups[run].items()})
        if not gradient:
            return Evidence(posterior.log_evidence, mean={name: mean[span] for name, span in nodes.items()})
        middle = np.einsum(
            "jka,jaib,ilb->kjli",
            roots,
            posterior.factor.inverse().reshape(len(roots), size, len(roots), size),
            roots,
            optimize=True,
        )
        second = _second_moments(covariance, middle, mean)
        on_covariance = 0.5 * (score @ score.T - np.einsum("kjki->ji", middle))
        mix = posterior.mix
        on_base = on_covariance if mix is None else mix.T @ on_covariance @ mix
        on_mix = None if mix is None else 2.0 * on_covariance @ mix @ posterior.base
        return self._collected(posterior.log_evidence, statistics, run, blocks, mean, second, on_base, on_mix)

    def posterior(
        self,
        run: str,
        response_values: Values,
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
    ) -> "DensePosterior":
        """The latent of one run given the data, seen through any response at any time."""
        blocks = self._covariance(run, response_values, length_scale, False)
        return self._posterior(run, response_values, length_scale, statistics, blocks)

    def _posterior(
        self,
        run: str,
        values: Values,
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
        blocks: "dict[tuple[str, str], _Block]",
    ) -> "DensePosterior":
        mixing = {name: _mixing(group, statistics[name]) for name, group in self.groups[run].items()}
        base = _assembled({pair: block.values for pair, block in blocks.items()}, list(mixing))
        mix = _block_diagonal([mixing[name] for name in mixing])
        covariance = base if mix is None else mix @ base @ mix.T
        found = [_roots(statistics[name]) for name in mixing]
        roots, data = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = len(roots) * self.n_factors
        inner = np.einsum("ji,jka,ikb->jaib", covariance, roots, roots, optimize=True).reshape(order, order)
        inner[np.diag_indices(order)] += 1.0
        factor = factorize(inner, copies=3.0, overwrite=True)
        return DensePosterior(
            self.groups[run], values, length_scale, self.matern, base, mix, covariance, roots, data, factor
        )

    def _covariance(
        self, run: str, values: Values, length_scale: float, gradient: bool
    ) -> "dict[tuple[str, str], _Block]":
        groups, out = self.groups[run], {}
        for (a, b), (lags, index) in self._lags[run].items():
            table, slopes = cross_covariance(
                groups[a].response,
                values.get(a),
                groups[b].response,
                values.get(b),
                lags,
                length_scale=length_scale,
                matern=self.matern,
                gradient=gradient,
            )
            out[a, b] = _Block(table[index], index, slopes)
        return out

    def _collected(
        self,
        log_evidence: float,
        statistics: Mapping[str, GroupStatistics],
        run: str,
        blocks: "dict[tuple[str, str], _Block]",
        mean: np.ndarray,
        second: np.ndarray,
        on_base: np.ndarray,
        on_mix: np.ndarray | None,
    ) -> Evidence:
        """Node results by modality, and the derivative in C pulled back to responses and length scale."""
        groups = self.groups[run]
        nodes = _slices({name: group.n_nodes for name, group in groups.items()})
        times = _slices({name: len(group.times) for name, group in groups.items()})
        moments, coefficients = {}, {}
        for name, group in groups.items():
            moments[name] = np.zeros(statistics[name].precision.shape)
            np.add.at(moments[name], statistics[name].index, second[nodes[name]])
            if on_mix is not None and group.pairs is not None:
                coefficients[name] = np.take_along_axis(on_mix[nodes[name], times[name]], group.pairs, axis=1)
        slopes: dict[str, dict[str, float]] = {
            name: dict.fromkeys(group.response.free, 0.0) for name, group in groups.items()
        }
        length_scale = 0.0
        for (a, b), block in blocks.items():
            each = on_base[times[a], times[b]] * (1.0 if a == b else 2.0)
            lags = int(block.index.max()) + 1
            by_lag = np.bincount(block.index.ravel(), each.ravel(), minlength=lags)
            for (side, parameter), slope in block.slopes.items():
                value = float(by_lag @ slope)
                if side == "length_scale":
                    length_scale += value
                else:
                    slopes[a if side == "a" else b][parameter] += value
        return Evidence(
            log_evidence,
            True,
            "",
            {name: mean[nodes[name]] for name in groups},
            moments,
            slopes,
            length_scale if self.length_scale_slope else 0.0,
            coefficients,
        )


@dataclass(frozen=True, eq=False)
class DenseFunctionals:
    """The factors seen through one response at some times.

    Attributes
    ----------
    response : Response
    values : {name: float} or None
    times : (functional,)
        Seconds.
    cross : (functional, node)
        Covariance with the nodes, of one factor.
    """

    response: Response
    values: Mapping[str, float] | None
    times: np.ndarray
    cross: np.ndarray


@dataclass(frozen=True, eq=False)
class DensePosterior:
    """The latent of one run given its data; check ``factor.ok`` first.

    Attributes
    ----------
    groups : {modality: NodeGroup}
    values : {modality: {name: float}}
    length_scale : float
        Seconds.
    matern : Matern
    base : (time, time)
        Prior covariance of one factor's functionals at the times of all groups.
    mix : (node, time) or None
        Nodes as combinations of them; None where they are the same.
    covariance : (node, node)
    roots : (node, K, K)
        L of each node.
    data : (node, K)
        q of each node.
    factor : Factor
        Of M.
    """

    groups: Mapping[str, NodeGroup]
    values: Values
    length_scale: float
    matern: Matern
    base: np.ndarray
    mix: np.ndarray | None
    covariance: np.ndarray
    roots: np.ndarray
    data: np.ndarray
    factor: Factor

    @cached_property
    def _reduced(self) -> np.ndarray:
        """q whitened by M."""
        return self.factor.whiten(self.data.ravel())

    @cached_property
    def log_evidence(self) -> float:
        """The log evidence."""
        taken = self._reduced @ self._reduced
        return 0.5 * float(np.sum(self.data**2) - taken - self.factor.log_determinant)

    @cached_property
    def score(self) -> np.ndarray:
        """``h - D E[g]`` (node, K)."""
        solved = self.factor.whiten(self._reduced, transpose=True).reshape(self.data.shape)
        return np.einsum("jka,ja->jk", self.roots, solved)

    def functionals(
        self, response: Response, values: Mapping[str, float] | None, times: np.ndarray
    ) -> DenseFunctionals:
        """The factors seen through a response at times (functional,) in seconds."""
        cross = []
        for name, group in self.groups.items():
            lags, index = distinct_lags(times, group.times)
            cross.append(self._covariance(response, values, group.response, self.values.get(name), lags)[index])
        joined = np.concatenate(cross, axis=1)
        return DenseFunctionals(response, values, times, joined if self.mix is None else joined @ self.mix.T)

    def _covariance(
        self,
        a: Response,
        values_a: Mapping[str, float] | None,
        b: Response,
        values_b: Mapping[str, float] | None,
        lags: np.ndarray,
    ) -> np.ndarray:
        made = cross_covariance(
            a, values_a, b, values_b, lags, length_scale=self.length_scale, matern=self.matern, gradient=False
        )
        return made[0]

    def mean_of(self, made: DenseFunctionals) -> np.ndarray:
        """E[g], (functional, K)."""
        return made.cross @ self.score

    def covariance_of(self, made: DenseFunctionals) -> np.ndarray:
        """Cov(g) of each functional, (functional, K, K)."""
        variance = self._covariance(made.response, made.values, made.response, made.values, np.zeros(1))
        out = np.tile(variance * np.eye(self.data.shape[1]), (len(made.times), 1, 1))
        for start in range(0, len(out), _WHITENED_TOGETHER):
            part = slice(start, start + _WHITENED_TOGETHER)
            white = self._whitened(made.cross[part])
            out[part] -= np.einsum("xjk,xjl->jkl", white, white)
        return out

    def joint_covariance(self, made: Sequence[DenseFunctionals]) -> np.ndarray:
        """Cov of all functionals of several responses, (functional, K, functional, K), in the order given."""
        rows = []
        for a in made:
            row = []
            for b in made:
                lags, index = distinct_lags(a.times, b.times)
                row.append(self._covariance(a.response, a.values, b.response, b.values, lags)[index])
            rows.append(row)
        white = self._whitened(np.concatenate([one.cross for one in made]))
        prior = np.einsum("ji,kl->jkil", np.block(rows), np.eye(self.data.shape[1]))
        return prior - np.tensordot(white, white, (0, 0))

    def _whitened(self, cross: np.ndarray) -> np.ndarray:
        """``M^-1/2 L' c'`` of functionals, (node * K, functional, K)."""
        pulled = np.einsum("jka,qj->jaqk", self.roots, cross)
        shape = len(self.roots) * self.roots.shape[2], -1
        return self.factor.whiten(pulled.reshape(shape)).reshape(shape[0], *pulled.shape[2:])


@dataclass(frozen=True, eq=False)
class _Block:
    """Covariance between the times of two modalities, by distinct lag."""

    values: np.ndarray
    index: np.ndarray
    slopes: dict[tuple[str, str], np.ndarray]


def distinct_lags(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values of ``first[j] - second[i]`` (lag,), and which of them each pair has (first, second)."""
    lags = first[:, None] - second[None, :]
    _, where, index = np.unique(np.round(lags, _LAG_DIGITS), return_index=True, return_inverse=True)
    return lags.ravel()[where], index.reshape(lags.shape)


def _slices(counts: dict[str, int]) -> dict[str, slice]:
    stops = np.cumsum(list(counts.values()))
    return {
        name: slice(int(stop) - count, int(stop)) for (name, count), stop in zip(counts.items(), stops, strict=True)
    }


def _assembled(blocks: dict[tuple[str, str], np.ndarray], names: list[str]) -> np.ndarray:
    rows = [[blocks[a, b] if (a, b) in blocks else blocks[b, a].T for b in names] for a in names]
    return np.block(rows)


def _mixing(group: NodeGroup, statistics: GroupStatistics) -> np.ndarray | int:
    """Nodes as combinations of the functionals at the group's times (node, time); a count where they are the same."""
    if group.pairs is None or statistics.coefficients is None:
        return len(group.times)
    mix = np.zeros((group.n_nodes, len(group.times)))
    np.add.at(mix, (np.arange(group.n_nodes)[:, None], group.pairs), statistics.coefficients)
    return mix


def _block_diagonal(blocks: list[np.ndarray | int]) -> np.ndarray | None:
    if all(isinstance(block, int) for block in blocks):
        return None
    dense = [np.eye(block) if isinstance(block, int) else block for block in blocks]
    out = np.zeros((sum(len(block) for block in dense), sum(block.shape[1] for block in dense)))
    row = column = 0
    for block in dense:
        out[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return out


def _roots(statistics: GroupStatistics) -> tuple[np.ndarray, np.ndarray]:
    """L of each node (node, K, K) with ``L L' = D`` of any rank, and q (node, K) with ``L q = h``."""
    values, vectors = np.linalg.eigh(statistics.precision)
    scale = np.sqrt(np.where(values > RANK * values[:, -1:], values, 0.0))
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0.0)
    of_nodes, index = vectors[statistics.index], statistics.index
    data = np.einsum("jka,jk->ja", of_nodes, statistics.information) * inverse[index]
    return of_nodes * scale[index][:, None, :], data


def _second_moments(covariance: np.ndarray, middle: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """E[g g'] of every node (node, K, K): prior covariance less what the data take, plus the means' products."""
    size = mean.shape[1]
    out = mean[:, :, None] * mean[:, None, :]
    out[:, np.arange(size), np.arange(size)] += covariance.diagonal()[:, None]
    for i in range(size):
        for k in range(i + 1):
            taken = np.einsum("ji,ji->j", covariance @ middle[i, :, k, :], covariance)
            out[:, i, k] -= taken
            if i != k:
                out[:, k, i] -= taken
    return out
