"""The latent-marginal log likelihood of GP-MSRM and its gradient, above any backend (DESIGN 3.1).

All scalars at node j enter through ``D_j = sum w w' / v``, ``h_j = sum w (y - b) / v`` and
``c = sum (y - b)^2 / v + log 2 pi v``, with 1/v times the modality's power. The log likelihood is ``-c/2`` plus the log
evidence of each run; derivatives in loadings, offsets and noise follow by Fisher's identity from E[g] and E[g g'].
Written once: for raw features and rotated ones, complete or masked, white or Ornstein-Uhlenbeck residuals.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from msrm.gp.data import NodeLayout, PairData, PairRows
from msrm.gp.parameters import Layout, Parameters, Specification
from msrm.gp.terms import OrnsteinUhlenbeck
from msrm.nodes import Backend, Evidence, GroupStatistics

_LOG_TWO_PI = float(np.log(2.0 * np.pi))


@dataclass(frozen=True, eq=False)
class Likelihood:
    """Log likelihood of fixed data as a function of the parameters.

    Attributes
    ----------
    specification : Specification
    nodes : NodeLayout
    backend : Backend
    """

    specification: Specification
    nodes: NodeLayout
    backend: Backend
    _masks: dict[tuple[str, str], np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def layout(self) -> Layout:
        """Names and shapes of the parameters, in the coordinates of the data."""
        return Layout.of(self.specification, self.nodes.pairs)

    def with_backend(self, backend: Backend) -> "Likelihood":
        """The same likelihood integrated by another backend."""
        return replace(self, backend=backend)

    def value(self, parameters: Parameters) -> float:
        """Log likelihood; NaN where a factorization fails."""
        summed = self.summed(parameters)
        return summed.constant + sum(self._evidence(run, parameters, summed, False).log_evidence for run in self.runs)

    def value_and_gradient(self, parameters: Parameters) -> tuple[float, Parameters]:
        """Log likelihood and its derivatives, named like the parameters; NaN where a factorization fails."""
        return self.value_gradient_moments(parameters)[:2]

    def value_gradient_moments(
        self, parameters: Parameters
    ) -> tuple[float, Parameters, dict[tuple[str, str], "PairMoments"]]:
        """:meth:`value_and_gradient` and what each pair's loadings see of the latents."""
        summed = self.summed(parameters)
        evidence = {run: self._evidence(run, parameters, summed, True) for run in self.runs}
        value = summed.constant + sum(one.log_evidence for one in evidence.values())
        if not np.isfinite(value):
            return np.nan, {name: np.full(shape, np.nan) for name, shape in self.layout.shapes.items()}, {}
        gradient = {name: np.zeros(shape) for name, shape in self.layout.shapes.items()}
        for run, one in evidence.items():
            for modality, slopes in one.response_gradient.items():
                for name, slope in slopes.items():
                    gradient[f"response/{modality}/{name}"] += slope
            if "length_scale" in gradient:
                gradient["length_scale"] += one.length_scale_gradient
            for modality, on_nodes in one.coefficient_gradient.items():
                self._add_timescale(gradient, parameters, run, modality, on_nodes)
        moments = {pair.key: self._add_pair(gradient, parameters, pair, summed, evidence) for pair in self.nodes.pairs}
        return value, gradient, moments

    def node_means(self, parameters: Parameters) -> dict[tuple[str, str], np.ndarray] | None:
        """E[g] (node, K) by run and modality, or None where a factorization fails."""
        summed = self.summed(parameters)
        evidence = {run: self._evidence(run, parameters, summed, True) for run in self.runs}
        if not all(one.ok for one in evidence.values()):
            return None
        return {(run, modality): mean for run, one in evidence.items() for modality, mean in one.mean.items()}

    @property
    def runs(self) -> tuple[str, ...]:
        """Runs with data."""
        return tuple(self.nodes.groups)

    def diagnostic(self, parameters: Parameters) -> str:
        """Why the log likelihood is not finite: the first run that fails, and how; empty if none does."""
        summed = self.summed(parameters)
        for run in self.runs:
            one = self._evidence(run, parameters, summed, False)
            if not one.ok:
                return f"{run}: {one.diagnostic}"
        return "" if np.isfinite(summed.constant) else "the residual sums of squares are not finite"

    def statistics(self, parameters: Parameters) -> dict[str, dict[str, GroupStatistics]]:
        """What the data say of each run's nodes, by run and modality."""
        return self.summed(parameters).statistics

    def _evidence(self, run: str, parameters: Parameters, summed: "Summed", gradient: bool) -> Evidence:
        specification = self.specification
        return self.backend.evidence(
            run,
            specification.response_values(parameters),
            specification.length_scale_of(parameters),
            summed.statistics[run],
            gradient,
        )

    def summed(self, parameters: Parameters) -> "Summed":
        """Sums over all observations."""
        specification, nodes = self.specification, self.nodes
        information = {
            (run, modality): np.zeros((group.n_nodes, specification.n_factors))
            for run, groups in nodes.groups.items()
            for modality, group in groups.items()
        }
        grams, constant = {}, 0.0
        for pair in nodes.pairs:
            scale = self._scale(pair, parameters)
            loading = parameters[_name("loading", pair)]
            pulled, squares = np.zeros((len(nodes.rows[pair.key].current), specification.n_factors)), 0.0
            for span, _, centred in self._centred(pair, parameters):
                pulled += centred @ loading[span]
                squares += float(np.vdot(centred, centred))
            for run, (entry, node) in nodes.rows[pair.key].runs.items():
                information[run, pair.modality][node] += scale * pulled[entry]
            grams[pair.key] = scale * _pattern_grams(pair, loading)
            constant -= 0.5 * scale * squares + self._normalizer(pair, parameters)
        statistics: dict[str, dict[str, GroupStatistics]] = {}
        for (run, modality), classes in nodes.classes.items():
            parts = [grams[participant, modality] for participant in classes.columns]
            precision = np.tensordot(classes.presence, np.concatenate(parts), 1)
            statistics.setdefault(run, {})[modality] = GroupStatistics(
                precision, classes.index, information[run, modality], self._coefficients(run, modality, parameters)
            )
        return Summed(statistics, constant)

    def _scale(self, pair: PairData, parameters: Mapping[str, np.ndarray]) -> float:
        """Precision of a scalar: power over noise variance."""
        return self.specification.power(pair.modality) / float(parameters[_name("noise", pair)])

    def _coefficients(self, run: str, modality: str, parameters: Mapping[str, np.ndarray]) -> np.ndarray | None:
        residual = self.specification.residual(modality)
        if not isinstance(residual, OrnsteinUhlenbeck):
            return None
        return residual.coefficients(
            self.nodes.gaps[run, modality], self.specification.timescale_of(parameters, modality)
        )

    def _pair_gaps(self, pair: PairData) -> np.ndarray:
        rows = self.nodes.rows[pair.key]
        return pair.times[rows.current] - pair.times[rows.previous]

    def _mask(self, pair: PairData) -> np.ndarray | None:
        """1 where an entry has a coordinate (entry, coordinate); None when all do."""
        rows = self.nodes.rows[pair.key]
        if rows.complete:
            return None
        if pair.key not in self._masks:
            self._masks[pair.key] = np.ascontiguousarray(rows.present[pair.pattern].T)
        return self._masks[pair.key]

    def _centred(
        self, pair: PairData, parameters: Mapping[str, np.ndarray]
    ) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Blocks of coordinates: slice, data less offsets (row, .), whitened entries (entry, .), 0 where missing."""
        rows, offset, mask = self.nodes.rows[pair.key], parameters[_name("offset", pair)], self._mask(pair)
        residual = self.specification.residual(pair.modality)
        for span, values in pair:
            data = values - offset[span]
            if pair.modality in self.specification.run_offsets:
                for run, part in pair.rows.items():
                    data[part] -= parameters[f"run_offset/{pair.participant}/{run}/{pair.modality}"][span]
            entries = data if rows.plain else data[rows.current]
            if isinstance(residual, OrnsteinUhlenbeck):
                timescale = self.specification.timescale_of(parameters, pair.modality)
                weights = residual.coefficients(self._pair_gaps(pair), timescale)
                entries = weights[:, :1] * entries + weights[:, 1:] * data[rows.previous]
            if mask is not None:
                entries = entries * mask[:, span]
            yield span, data, entries

    def _normalizer(self, pair: PairData, parameters: Mapping[str, np.ndarray]) -> float:
        """Half the sum of log 2 pi v over the pair's scalars, null features included, times the power."""
        present, counts = self.nodes.rows[pair.key].present, _pattern_counts(pair)
        variance = float(parameters[_name("noise", pair)])
        total = float(counts @ present.sum(axis=1)) * (_LOG_TWO_PI + np.log(variance))
        residual = self.specification.residual(pair.modality)
        if isinstance(residual, OrnsteinUhlenbeck):
            timescale = self.specification.timescale_of(parameters, pair.modality)
            total += float(counts @ present @ residual.log_variance(self._pair_gaps(pair), timescale))
        return 0.5 * self.specification.power(pair.modality) * total

    def _add_pair(
        self,
        gradient: Parameters,
        parameters: Parameters,
        pair: PairData,
        summed: "Summed",
        evidence: Mapping[str, Evidence],
    ) -> "PairMoments":
        """Moments of a pair; adds the derivatives in its parameters, and its data's in the residual timescale."""
        rows, mask, scale = self.nodes.rows[pair.key], self._mask(pair), self._scale(pair, parameters)
        loading, size = parameters[_name("loading", pair)], self.specification.n_factors
        means, spread = np.zeros((len(rows.current), size)), np.zeros((len(pair.patterns), size, size))
        for run, (entry, node) in rows.runs.items():
            mean, classes = evidence[run].mean[pair.modality], self.nodes.classes[run, pair.modality]
            means[entry] = mean[node]
            covariance = evidence[run].second_moment[pair.modality] - _class_sums(mean, classes.index)
            spread += np.tensordot(classes.presence[:, classes.columns[pair.participant]].T, covariance, 1)
        weights = self._entry_weights(pair, parameters)
        total, on_weights = 0.0, np.zeros((len(rows.current), 2))
        for span, data, centred in self._centred(pair, parameters):
            part = loading[span]
            error = centred - means @ part.T
            if mask is not None:
                error *= mask[:, span]
            shrunk = _times_spread(part, spread, pair.pattern[span])
            gradient[_name("loading", pair)][span] = scale * (error.T @ means - shrunk)
            by_row = error if weights is None else error * weights.sum(axis=1)[:, None]
            gradient[_name("offset", pair)][span] = scale * by_row.sum(axis=0)
            if pair.modality in self.specification.run_offsets:
                for run, (entry, _) in rows.runs.items():
                    name = f"run_offset/{pair.participant}/{run}/{pair.modality}"
                    gradient[name][span] = scale * by_row[entry].sum(axis=0)
            total += float(np.vdot(error, error) + np.vdot(part, shrunk))
            if weights is not None:
                on_weights[:, 0] -= scale * np.einsum("nf,nf->n", error, data[rows.current])
                on_weights[:, 1] -= scale * np.einsum("nf,nf->n", error, data[rows.previous])
        noise, power = float(parameters[_name("noise", pair)]), self.specification.power(pair.modality)
        scalars = float(_pattern_counts(pair) @ rows.present.sum(axis=1))
        gradient[_name("noise", pair)] += 0.5 * power * (total / noise - scalars) / noise
        name = f"residual_timescale/{pair.modality}"
        if name in gradient:
            gradient[name] += self._entries_timescale(pair, parameters, on_weights)
        return _pair_moments(pair, rows, scale, scalars, means, spread, weights)

    def _entry_weights(self, pair: PairData, parameters: Mapping[str, np.ndarray]) -> np.ndarray | None:
        residual = self.specification.residual(pair.modality)
        if not isinstance(residual, OrnsteinUhlenbeck):
            return None
        return residual.coefficients(self._pair_gaps(pair), self.specification.timescale_of(parameters, pair.modality))

    def _entries_timescale(self, pair: PairData, parameters: Mapping[str, np.ndarray], on_weights: np.ndarray) -> float:
        """The timescale's derivative through a pair's whitened data and their normalizer."""
        residual = self.specification.residual(pair.modality)
        if not isinstance(residual, OrnsteinUhlenbeck):
            return 0.0
        gaps, timescale = self._pair_gaps(pair), self.specification.timescale_of(parameters, pair.modality)
        counts = _pattern_counts(pair) @ self.nodes.rows[pair.key].present
        through_data = np.sum(on_weights * residual.coefficient_slopes(gaps, timescale))
        normalizer = 0.5 * self.specification.power(pair.modality) * counts
        return float(through_data - normalizer @ residual.log_variance_slope(gaps, timescale))

    def _add_timescale(
        self, gradient: Parameters, parameters: Parameters, run: str, modality: str, on_nodes: np.ndarray
    ) -> None:
        """The timescale's derivative through the latent functionals."""
        residual, name = self.specification.residual(modality), f"residual_timescale/{modality}"
        if name in gradient and isinstance(residual, OrnsteinUhlenbeck):
            timescale = self.specification.timescale_of(parameters, modality)
            slopes = residual.coefficient_slopes(self.nodes.gaps[run, modality], timescale)
            gradient[name] += float(np.sum(on_nodes * slopes))


@dataclass(frozen=True, eq=False)
class PairMoments:
    """What the loadings of a pair see: second moments of [g 1] over its observations.

    Attributes
    ----------
    gram : (K + 1, K + 1)
        Expected sum of [g 1]'[g 1] over the entries of the pair.
    share : (coordinate,)
        Entries in which a coordinate is observed, as a share of all.
    scale : float
        Precision of a scalar, 1/v times the power.
    scalars : float
        Observations, null features included.
    run_rows : {run: float}
        Summed squared weights of the constant in each run's entries.
    """

    gram: np.ndarray
    share: np.ndarray
    scale: float
    scalars: float
    run_rows: dict[str, float]


def _pair_moments(
    pair: PairData,
    rows: PairRows,
    scale: float,
    scalars: float,
    means: np.ndarray,
    spread: np.ndarray,
    weights: np.ndarray | None,
) -> PairMoments:
    ones = np.ones(len(means)) if weights is None else weights.sum(axis=1)
    seen = np.column_stack([means, ones])
    gram = seen.T @ seen
    features = np.bincount(pair.pattern, minlength=len(pair.patterns)).astype(float)
    counts = rows.present.sum(axis=1) / max(len(means), 1)
    # Patterns see different rows: their spread is scaled back to all of them before it is averaged.
    weight = features / features.sum()
    gram[:-1, :-1] += np.tensordot(weight / np.maximum(counts, 1.0 / max(len(means), 1)), spread, 1)
    return PairMoments(
        gram,
        counts[pair.pattern],
        scale,
        scalars,
        {run: float(ones[entry] @ ones[entry]) for run, (entry, _) in rows.runs.items()},
    )


@dataclass(frozen=True, eq=False)
class Summed:
    """Statistics by run and modality, and ``-c/2`` over all scalars."""

    statistics: dict[str, dict[str, GroupStatistics]]
    constant: float


def _name(kind: str, pair: PairData) -> str:
    return f"{kind}/{pair.participant}/{pair.modality}"


def _pattern_counts(pair: PairData) -> np.ndarray:
    """Features of each mask pattern, null ones included, (pattern,)."""
    return np.bincount(pair.pattern, minlength=len(pair.patterns)) + pair.null_counts


def _pattern_grams(pair: PairData, loading: np.ndarray) -> np.ndarray:
    """Sum of w w' over the coordinates of each mask pattern, (pattern, K, K)."""
    if len(pair.patterns) == 1:
        return (loading.T @ loading)[None]
    out = np.zeros((len(pair.patterns), loading.shape[1], loading.shape[1]))
    np.add.at(out, pair.pattern, loading[:, :, None] * loading[:, None, :])
    return out


def _times_spread(loading: np.ndarray, spread: np.ndarray, pattern: np.ndarray) -> np.ndarray:
    """Loadings times the summed covariance of their pattern's functionals, (coordinate, K)."""
    if len(spread) == 1:
        return loading @ spread[0]
    return np.einsum("fk,fkl->fl", loading, spread[pattern])


def _class_sums(mean: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Sum of E[g] E[g]' over the nodes of each class, (class, K, K)."""
    out = np.zeros((int(index.max()) + 1, mean.shape[1], mean.shape[1]))
    np.add.at(out, index, mean[:, :, None] * mean[:, None, :])
    return out
