"""The latent-marginal log likelihood of GP-MSRM and its gradient, above any backend (DESIGN 3.1).

All scalars at node j enter through ``D_j = sum w w' / v``, ``h_j = sum w (y - b) / v`` and
``c = sum (y - b)^2 / v + log 2 pi v``, with 1/v times the modality's power. The log likelihood is ``-c/2`` plus the log
evidence of each run; derivatives in loadings, offsets and noise follow by Fisher's identity from E[g] and E[g g'].
Written once: for raw features and rotated ones, complete or masked, white or Ornstein-Uhlenbeck residuals. The sums of
one participant-modality are :mod:`msrm.gp.pair_likelihood`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from msrm.gp.data import Key, NodeLayout
from msrm.gp.node_terms import class_sums
from msrm.gp.pair_likelihood import PairLikelihood, PairMoments
from msrm.gp.parameters import Layout, Parameters, Specification
from msrm.nodes import Backend, Evidence, GroupStatistics

__all__ = ["Likelihood", "PairMoments", "Summed"]


@dataclass(frozen=True, eq=False)
class Summed:
    """Statistics by run and modality, and ``-c/2`` over all scalars."""

    statistics: dict[str, dict[str, GroupStatistics]]
    constant: float


@dataclass(frozen=True, eq=False)
class Likelihood:
    """Log likelihood of fixed data as a function of the parameters.

    Attributes
    ----------
    specification : Specification
    nodes : NodeLayout
    backend : Backend
    terms : tuple of PairLikelihood
        One per participant-modality; made from the nodes.
    """

    specification: Specification
    nodes: NodeLayout
    backend: Backend
    terms: tuple[PairLikelihood, ...] = ()

    def __post_init__(self) -> None:
        if not self.terms:
            made = [PairLikelihood(self.specification, pair, self.nodes.rows[pair.key]) for pair in self.nodes.pairs]
            object.__setattr__(self, "terms", tuple(made))

    @cached_property
    def layout(self) -> Layout:
        """Names and shapes of the parameters, in the coordinates of the data."""
        return Layout.of(self.specification, self.nodes.pairs)

    @property
    def runs(self) -> tuple[str, ...]:
        """Runs with data."""
        return tuple(self.nodes.groups)

    def with_backend(self, backend: Backend) -> "Likelihood":
        """The same likelihood integrated by another backend."""
        return replace(self, backend=backend)

    def value(self, parameters: Parameters) -> float:
        """Log likelihood; NaN where a factorization fails."""
        summed = self.summed(parameters)
        return summed.constant + sum(one.log_evidence for one in self._evidence(parameters, summed, False).values())

    def value_and_gradient(self, parameters: Parameters) -> tuple[float, Parameters]:
        """Log likelihood and its derivatives, named like the parameters; NaN where a factorization fails."""
        return self._differentiated(parameters)[:2]

    def value_gradient_moments(self, parameters: Parameters) -> tuple[float, Parameters, dict[Key, PairMoments]]:
        """:meth:`value_and_gradient` and what each pair's loadings see of the latents."""
        value, gradient, seen = self._differentiated(parameters)
        terms = {one.pair.key: one for one in self.terms}
        return value, gradient, {key: terms[key].moments(parameters, *latents) for key, latents in seen.items()}

    def _differentiated(
        self, parameters: Parameters
    ) -> tuple[float, Parameters, dict[Key, tuple[np.ndarray, np.ndarray]]]:
        """Value, gradient, and the means and covariances of the latents that each pair sees."""
        summed = self.summed(parameters)
        evidence = self._evidence(parameters, summed, True)
        value = summed.constant + sum(one.log_evidence for one in evidence.values())
        if not np.isfinite(value):
            return np.nan, {name: np.full(shape, np.nan) for name, shape in self.layout.shapes.items()}, {}
        gradient = {name: np.zeros(shape) for name, shape in self.layout.shapes.items()}
        self._add_scalars(gradient, parameters, evidence)
        seen = {}
        covariances = self._covariances(evidence)
        for terms in self.terms:
            seen[terms.pair.key] = latents = self._seen(terms, evidence, covariances)
            for name, slope in terms.gradient(parameters, *latents).items():
                gradient[name] += slope
        return value, gradient, seen

    def node_means(self, parameters: Parameters) -> dict[tuple[str, str], np.ndarray] | None:
        """E[g] (node, K) by run and modality, or None where a factorization fails."""
        summed = self.summed(parameters)
        evidence = self._evidence(parameters, summed, False)
        if not all(one.mean for one in evidence.values()):
            # Compiled backends get them by differentiation.
            evidence = self._evidence(parameters, summed, True)
        if not all(one.ok for one in evidence.values()):
            return None
        return {(run, modality): mean for run, one in evidence.items() for modality, mean in one.mean.items()}

    def diagnostic(self, parameters: Parameters) -> str:
        """Why the log likelihood is not finite: the first run that fails, and how; empty if none does."""
        summed = self.summed(parameters)
        for run, one in self._evidence(parameters, summed, False).items():
            if not one.ok:
                return f"{run}: {one.diagnostic}"
        return "" if np.isfinite(summed.constant) else "the residual sums of squares are not finite"

    def statistics(self, parameters: Parameters) -> dict[str, dict[str, GroupStatistics]]:
        """What the data say of each run's nodes, by run and modality."""
        return self.summed(parameters).statistics

    def summed(self, parameters: Parameters) -> Summed:
        """Sums over all observations."""
        nodes, size = self.nodes, self.specification.n_factors
        information = {place: np.zeros((len(one.index), size)) for place, one in nodes.classes.items()}
        sums = {}
        for terms in self.terms:
            sums[terms.pair.key] = found = terms.sums(parameters)
            for run, (entry, node) in terms.rows.runs.items():
                information[run, terms.pair.modality][node] += found.information[entry]
        statistics: dict[str, dict[str, GroupStatistics]] = {}
        for (run, modality), classes in nodes.classes.items():
            patterns = np.concatenate([sums[participant, modality].precision for participant in classes.columns])
            statistics.setdefault(run, {})[modality] = GroupStatistics(
                np.tensordot(classes.presence, patterns, 1),
                classes.index,
                information[run, modality],
                self.specification.residual(modality).coefficients(
                    nodes.gaps[run, modality], self.specification.timescale_of(parameters, modality)
                ),
            )
        return Summed(statistics, sum(found.constant for found in sums.values()))

    def _evidence(self, parameters: Parameters, summed: Summed, gradient: bool) -> dict[str, Evidence]:
        values = self.specification.response_values(parameters)
        length_scale = self.specification.length_scale_of(parameters)
        return {
            run: self.backend.evidence(run, values, length_scale, summed.statistics[run], gradient) for run in self.runs
        }

    def _add_scalars(self, gradient: Parameters, parameters: Parameters, evidence: Mapping[str, Evidence]) -> None:
        """Derivatives in responses, length scale, and residual timescales through the latent functionals."""
        for run, one in evidence.items():
            for modality, slopes in one.response_gradient.items():
                for name, slope in slopes.items():
                    gradient[f"response/{modality}/{name}"] += slope
            if "length_scale" in gradient:
                gradient["length_scale"] += one.length_scale_gradient
            for modality, on_nodes in one.coefficient_gradient.items():
                name = f"residual_timescale/{modality}"
                if name in gradient:
                    timescale = self.specification.timescale_of(parameters, modality)
                    residual = self.specification.residual(modality)
                    moved = residual.coefficient_slopes(self.nodes.gaps[run, modality], timescale)
                    gradient[name] += np.sum(on_nodes * moved)

    def _covariances(self, evidence: Mapping[str, Evidence]) -> dict[tuple[str, str], np.ndarray]:
        """Cov(g) summed over the nodes of each class (class, K, K), by run and modality."""
        out = {}
        for (run, modality), classes in self.nodes.classes.items():
            mean = evidence[run].mean[modality]
            outer = class_sums(mean[:, :, None] * mean[:, None, :], classes.index, len(classes.presence))
            out[run, modality] = evidence[run].second_moment[modality] - outer
        return out

    def _seen(
        self,
        terms: PairLikelihood,
        evidence: Mapping[str, Evidence],
        covariances: Mapping[tuple[str, str], np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """E[g] of a pair's entries (entry, K), and Cov(g) summed over the entries of each pattern (pattern, K, K)."""
        size, modality = self.specification.n_factors, terms.pair.modality
        means = np.zeros((len(terms.rows.current), size))
        spread = np.zeros((len(terms.pair.patterns), size, size))
        for run, (entry, node) in terms.rows.runs.items():
            means[entry] = evidence[run].mean[modality][node]
            classes = self.nodes.classes[run, modality]
            presence = classes.presence[:, classes.columns[terms.pair.participant]]
            spread += np.tensordot(presence.T, covariances[run, modality], 1)
        return means, spread
