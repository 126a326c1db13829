"""One participant-modality's part of the log likelihood: its sums over rows, and derivatives in its own parameters.

With residuals whitened by :mod:`msrm.gp.terms`, entry n of a coordinate is ``x_n = c_n . (y - b)``, where c differences
neighbouring rows (1 for white residuals), and ``x_n ~ N(w . g_n, v / power)`` given the latent functional of its node.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from msrm.gp.data import PairData, PairRows
from msrm.gp.parameters import Parameters, Specification

_LOG_TWO_PI = float(np.log(2.0 * np.pi))


@dataclass(frozen=True, eq=False)
class PairSums:
    """What a pair adds to the statistics of its nodes.

    Attributes
    ----------
    information : (entry, K)
        ``sum_f w x / v``.
    precision : (pattern, K, K)
        ``sum_f w w' / v`` over the coordinates of each mask pattern.
    constant : float
        ``-c / 2`` over all scalars of the pair, null features included.
    """

    information: np.ndarray
    precision: np.ndarray
    constant: float


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


@dataclass(frozen=True, eq=False)
class PairLikelihood:
    """The likelihood of one pair given its nodes.

    Attributes
    ----------
    specification : Specification
    pair : PairData
    rows : PairRows
    """

    specification: Specification
    pair: PairData
    rows: PairRows

    @property
    def name(self) -> str:
        """``participant/modality``."""
        return f"{self.pair.participant}/{self.pair.modality}"

    @cached_property
    def gaps(self) -> np.ndarray:
        """Seconds between each entry and the row it is differenced with, (entry,)."""
        return self.pair.times[self.rows.current] - self.pair.times[self.rows.previous]

    @cached_property
    def counts(self) -> np.ndarray:
        """Scalars of each entry, null features included, (entry,)."""
        features = np.bincount(self.pair.pattern, minlength=len(self.pair.patterns)) + self.pair.null_counts
        return features @ self.rows.present

    @cached_property
    def mask(self) -> np.ndarray | None:
        """Whether an entry has a coordinate, (entry, coordinate); None when all do."""
        return None if self.rows.complete else np.ascontiguousarray(self.rows.present[self.pair.pattern].T)

    @cached_property
    def run_offset_names(self) -> dict[str, str]:
        """Names of the run offsets, by run."""
        if self.pair.modality not in self.specification.run_offsets:
            return {}
        return {run: f"run_offset/{self.pair.participant}/{run}/{self.pair.modality}" for run in self.pair.rows}

    def scale(self, parameters: Mapping[str, np.ndarray]) -> float:
        """Precision of a scalar: power over noise variance."""
        return self.specification.power(self.pair.modality) / float(parameters[f"noise/{self.name}"])

    def _weights(self, parameters: Mapping[str, np.ndarray]) -> np.ndarray | None:
        modality = self.pair.modality
        timescale = self.specification.timescale_of(parameters, modality)
        return self.specification.residual(modality).coefficients(self.gaps, timescale)

    def _blocks(
        self, parameters: Mapping[str, np.ndarray], weights: np.ndarray | None
    ) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Coordinates in blocks: slice, ``y - b`` (row, .), and x (entry, .), 0 where missing."""
        rows, offset, mask = self.rows, parameters[f"offset/{self.name}"], self.mask
        for span, values in self.pair:
            data = values - offset[span]
            for run, name in self.run_offset_names.items():
                data[self.pair.rows[run]] -= parameters[name][span]
            entries = data if rows.plain else data[rows.current]
            if weights is not None:
                entries = weights[:, :1] * entries + weights[:, 1:] * data[rows.previous]
            if mask is not None:
                entries = entries * mask[:, span]
            yield span, data, entries

    def sums(self, parameters: Mapping[str, np.ndarray]) -> PairSums:
        """The pair's part of the statistics."""
        loading, scale = parameters[f"loading/{self.name}"], self.scale(parameters)
        information, squares = np.zeros((len(self.rows.current), loading.shape[1])), 0.0
        for span, _, entries in self._blocks(parameters, self._weights(parameters)):
            information += entries @ loading[span]
            squares += float(np.vdot(entries, entries))
        constant = -0.5 * scale * squares - self._normalizer(parameters)
        return PairSums(scale * information, scale * self._grams(loading), constant)

    def _grams(self, loading: np.ndarray) -> np.ndarray:
        if len(self.pair.patterns) == 1:
            return (loading.T @ loading)[None]
        out = np.zeros((len(self.pair.patterns), loading.shape[1], loading.shape[1]))
        np.add.at(out, self.pair.pattern, loading[:, :, None] * loading[:, None, :])
        return out

    def _normalizer(self, parameters: Mapping[str, np.ndarray]) -> float:
        """Half the power times the sum of log 2 pi v s^2 over all scalars."""
        modality = self.pair.modality
        timescale = self.specification.timescale_of(parameters, modality)
        shrunk = self.counts @ self.specification.residual(modality).log_variance(self.gaps, timescale)
        variance = float(parameters[f"noise/{self.name}"])
        total = float(self.counts.sum()) * (_LOG_TWO_PI + np.log(variance)) + float(shrunk)
        return 0.5 * self.specification.power(modality) * total

    def gradient(self, parameters: Parameters, means: np.ndarray, spread: np.ndarray) -> Parameters:
        """Derivatives in the pair's parameters at its nodes' moments, by Fisher's identity.

        Parameters
        ----------
        parameters : Parameters
        means : (entry, K)
            E[g] of each entry's node.
        spread : (pattern, K, K)
            Cov(g) summed over the entries of each pattern.

        Returns
        -------
        Parameters
            The residual timescale's is what the pair's data contribute.
        """
        loading, scale, weights = parameters[f"loading/{self.name}"], self.scale(parameters), self._weights(parameters)
        ones = self._ones(weights)
        of_loading, of_offset = np.empty(loading.shape), np.empty(len(loading))
        of_runs = {name: np.zeros(len(loading)) for name in self.run_offset_names.values()}
        total, on_weights = 0.0, np.zeros((len(means), 2))
        for span, data, entries in self._blocks(parameters, weights):
            error = entries - means @ loading[span].T
            if self.mask is not None:
                error *= self.mask[:, span]
            shrunk = self._times_spread(span, loading[span], spread)
            of_loading[span] = error.T @ means - shrunk
            of_offset[span] = ones @ error
            for run, name in self.run_offset_names.items():
                entry = self.rows.runs[run][0]
                of_runs[name][span] = ones[entry] @ error[entry]
            total += float(np.vdot(error, error) + np.vdot(loading[span], shrunk))
            if weights is not None:
                on_weights[:, 0] -= np.einsum("nf,nf->n", error, data[self.rows.current])
                on_weights[:, 1] -= np.einsum("nf,nf->n", error, data[self.rows.previous])
        noise, power = float(parameters[f"noise/{self.name}"]), self.specification.power(self.pair.modality)
        out = {f"loading/{self.name}": scale * of_loading, f"offset/{self.name}": scale * of_offset}
        out |= {name: scale * value for name, value in of_runs.items()}
        out[f"noise/{self.name}"] = np.array(0.5 * power * (total / noise - self.counts.sum()) / noise)
        if self.specification.residual(self.pair.modality).free is not None:
            out[f"residual_timescale/{self.pair.modality}"] = self._timescale(parameters, scale * on_weights)
        return out

    def _times_spread(self, span: slice, loading: np.ndarray, spread: np.ndarray) -> np.ndarray:
        """Loadings times the summed covariance of their pattern's functionals, (coordinate, K)."""
        if len(spread) == 1:
            return loading @ spread[0]
        return np.einsum("fk,fkl->fl", loading, spread[self.pair.pattern[span]])

    def _timescale(self, parameters: Mapping[str, np.ndarray], on_weights: np.ndarray) -> np.ndarray:
        """The timescale's derivative through the whitened data and their normalizer."""
        modality = self.pair.modality
        residual, timescale = (
            self.specification.residual(modality),
            self.specification.timescale_of(parameters, modality),
        )
        through_data = np.sum(on_weights * residual.coefficient_slopes(self.gaps, timescale))
        normalizer = 0.5 * self.specification.power(modality) * self.counts
        return np.array(through_data - normalizer @ residual.log_variance_slope(self.gaps, timescale))

    def _ones(self, weights: np.ndarray | None) -> np.ndarray:
        """What a constant 1 becomes in each entry."""
        return np.ones(len(self.rows.current)) if weights is None else weights.sum(axis=1)

    def moments(self, parameters: Parameters, means: np.ndarray, spread: np.ndarray) -> PairMoments:
        """What the pair's loadings see; arguments as in :meth:`gradient`, which does without."""
        scale, ones = self.scale(parameters), self._ones(self._weights(parameters))
        entries = max(len(means), 1)
        seen = np.column_stack([means, ones])
        gram = seen.T @ seen
        features = np.bincount(self.pair.pattern, minlength=len(self.pair.patterns))
        share = self.rows.present.sum(axis=1) / entries
        # Patterns see different rows: their spread is scaled back to all of them before it is averaged.
        weight = features / max(int(features.sum()), 1) / np.maximum(share, 1.0 / entries)
        gram[:-1, :-1] += np.tensordot(weight, spread, 1)
        run_rows = {run: float(ones[entry] @ ones[entry]) for run, (entry, _) in self.rows.runs.items()}
        return PairMoments(gram, share[self.pair.pattern], scale, float(self.counts.sum()), run_rows)
