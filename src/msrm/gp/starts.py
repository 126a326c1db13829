"""Where the MAP search starts: principal components with a grid over responses, prior draws (DESIGN 5).

Real recordings have several basins, mostly in lags, so the responses of the first start are searched on a grid: with
latents inferred from one group of pairs alone, every other pair is regressed on each candidate's functionals. The best
candidate of each modality makes the first start, the best one elsewhere on the grid another. The translated R-MSRM fit
is made by :mod:`msrm.gp.translation`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from msrm.gp.data import PairData
from msrm.gp.likelihood import Likelihood
from msrm.gp.parameters import FreeLengthScale, Parameters
from msrm.responses import Free

_LAGS = 7  # candidates over the bounds of a parameter of either sign
_SCALES = 3  # of a positive one
_CANDIDATES = 63  # of one modality; grids are thinned to stay below
_RANK = 1e-12  # of the largest eigenvalue of a Gram: below it is rounding
_SPARE = 1e-3  # share of a stream's variance that a start leaves as noise at least


@dataclass(frozen=True, eq=False)
class Start:
    """A named starting point.

    Attributes
    ----------
    name : str
    parameters : Parameters
    refused : str
        Why there is no such start; empty when there is one.
    """

    name: str
    parameters: Parameters
    refused: str = ""


def component_starts(likelihood: Likelihood) -> Iterator[Start]:
    """Principal components of the largest group of pairs on one clock, with the best and the next best responses."""
    parameters = parameters_at_rest(likelihood)
    leaders = _leaders(likelihood)
    for pair, loading, noise in _components(leaders, likelihood.specification.n_factors):
        parameters[f"loading/{pair.participant}/{pair.modality}"] = loading
        parameters[f"noise/{pair.participant}/{pair.modality}"] = noise
    grid = _ResponseGrid.of(likelihood, leaders[0].modality)
    if not grid.candidates:
        yield Start("components", parameters)
        return
    scores = grid.scores(parameters)
    for name, chosen in grid.ranked(scores):
        yield Start(name, parameters | chosen)


def prior_start(likelihood: Likelihood, rng: np.random.Generator, name: str) -> Start:
    """A draw from the prior, with offsets at the means and noise at most the variance of the data."""
    layout, parameters = likelihood.layout, parameters_at_rest(likelihood)
    for key, shape in layout.shapes.items():
        sd = layout.normal_sd(key)
        if key.startswith("loading/"):
            parameters[key] = rng.standard_normal(shape) * (sd or 0.0)
        elif key in layout.scalar_priors and not key.startswith("noise/"):
            parameters[key] = np.asarray(float(layout.scalar_priors[key].sample(rng)))
    return Start(name, parameters)


def parameters_at_rest(likelihood: Likelihood) -> Parameters:
    """No loadings, offsets at the means, noise the variance of the data, scalars where they start."""
    layout, specification = likelihood.layout, likelihood.specification
    out = {name: np.zeros(shape) for name, shape in layout.shapes.items()}
    for pair in likelihood.nodes.pairs:
        name = f"{pair.participant}/{pair.modality}"
        mean, variance = _mean_and_variance(pair)
        out[f"offset/{name}"], out[f"noise/{name}"] = mean, np.asarray(variance)
    for key in out:
        kind, *rest = key.split("/")
        if kind == "response":
            out[key] = np.asarray(specification.responses[rest[0]].free[rest[1]].start)
        elif kind == "residual_timescale":
            out[key] = np.asarray(specification.timescale_start(rest[0]))
        elif kind == "length_scale" and isinstance(specification.length_scale, FreeLengthScale):
            out[key] = np.asarray(specification.length_scale.start)
    return out


def _present(pair: PairData) -> np.ndarray:
    return pair.patterns[pair.pattern].T


def _mean_and_variance(pair: PairData) -> tuple[np.ndarray, float]:
    mean, squares, total = np.zeros(pair.n_coordinates), 0.0, 0.0
    present = None if pair.complete else _present(pair)
    for span, values in pair:
        counts = np.full(values.shape[1], float(len(values))) if present is None else present[:, span].sum(axis=0)
        mean[span] = values.sum(axis=0) / np.maximum(counts, 1.0)
        centred = values - mean[span]
        if present is not None:
            centred = centred * present[:, span]
        squares += float(np.vdot(centred, centred))
        total += float(counts.sum())
    nulls = float(pair.null_counts @ pair.patterns.sum(axis=1))
    variance = squares / max(total + nulls, 1.0)
    return mean, variance if variance > 0.0 else 1.0


def _leaders(likelihood: Likelihood) -> list[PairData]:
    """The pairs of one modality that share one clock and hold most scalars, Identity ones first."""
    responses = likelihood.specification.responses
    clocks: dict[tuple[str, bytes], list[PairData]] = {}
    for pair in likelihood.nodes.pairs:
        runs = repr([(run, span.start, span.stop) for run, span in pair.rows.items()])
        clocks.setdefault((pair.modality, runs.encode() + pair.times.tobytes()), []).append(pair)

    def weight(pairs: list[PairData]) -> tuple[bool, float]:
        return responses[pairs[0].modality].is_identity, float(sum(len(p.times) * p.n_features for p in pairs))

    return max(clocks.values(), key=weight)


def _components(pairs: list[PairData], n_factors: int) -> Iterator[tuple[PairData, np.ndarray, np.ndarray]]:
    """Loadings on unit-variance principal components over the pairs' joint features, and what they leave."""
    centred = []
    for pair in pairs:
        mean, variance = _mean_and_variance(pair)
        whole = np.concatenate([values for _, values in pair], axis=1) - mean
        centred.append((whole if pair.complete else whole * _present(pair)) / np.sqrt(variance))
    scores = _principal_scores(np.concatenate(centred, axis=1), n_factors)
    for pair, one in zip(pairs, centred, strict=True):
        spread = np.sqrt(_mean_and_variance(pair)[1])
        loading = spread * (one.T @ scores) / len(scores)
        left = max(1.0 - float(np.sum(loading**2)) / (spread**2 * pair.n_features), _SPARE)
        yield pair, loading, np.asarray(spread**2 * left)


def _principal_scores(data: np.ndarray, count: int) -> np.ndarray:
    """Unit-variance scores (row, count) on the principal components of centred data, zero beyond their rank."""
    wide = data.shape[1] >= len(data)
    # The smaller Gram: long recordings of few features must not pay for the cube of their length.
    values, vectors = np.linalg.eigh(data @ data.T if wide else data.T @ data)
    kept = np.flatnonzero(values > _RANK * values[-1])[::-1][:count]
    scores = np.zeros((len(data), count))
    scores[:, : len(kept)] = vectors[:, kept] if wide else data @ vectors[:, kept] / np.sqrt(values[kept])
    return scores * np.sqrt(len(data))


@dataclass(frozen=True, eq=False)
class _ResponseGrid:
    """Candidate values of the free response parameters, by modality."""

    likelihood: Likelihood
    candidates: dict[str, list[dict[str, float]]]

    @classmethod
    def of(cls, likelihood: Likelihood, leading: str) -> "_ResponseGrid":
        used = {pair.modality for pair in likelihood.nodes.pairs} - {leading}
        candidates = {}
        for modality in (m for m in likelihood.specification.responses if m in used):
            response = likelihood.specification.responses[modality]
            axes = {name: _axis(free, name in response.positive) for name, free in response.free.items()}
            made = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
            if axes:
                candidates[modality] = made[:: -(-len(made) // _CANDIDATES)]
        return cls(likelihood, candidates)

    def scores(self, parameters: Parameters) -> dict[str, np.ndarray]:
        """Squared error left in each modality, in units of its variance, for each of its candidates."""
        out = {modality: np.full(len(made), np.inf) for modality, made in self.candidates.items()}
        for i in range(max(len(made) for made in self.candidates.values())):
            trial = {m: made[i % len(made)] for m, made in self.candidates.items()}
            point = parameters | _named(trial)
            means = self.likelihood.node_means(point)
            for modality, made in self.candidates.items():
                if i < len(made) and means is not None:
                    pairs = [pair for pair in self.likelihood.nodes.pairs if pair.modality == modality]
                    out[modality][i] = sum(_left(self.likelihood, pair, means) for pair in pairs)
        return out

    def ranked(self, scores: dict[str, np.ndarray]) -> Iterator[tuple[str, Parameters]]:
        """The best candidates, then those with the best other basin of the modality that is least sure."""
        best = {m: int(np.argmin(score)) for m, score in scores.items()}
        chosen = {m: self.candidates[m][i] for m, i in best.items()}
        yield "components", _named(chosen)
        gaps = {}
        for modality, score in scores.items():
            other = [
                i for i in _other_basins(self.candidates[modality], score, best[modality]) if np.isfinite(score[i])
            ]
            if other:
                runner = min(other, key=lambda i: float(score[i]))
                gaps[modality] = float(score[runner] - score[best[modality]]), runner
        if gaps:
            modality = min(gaps, key=lambda m: gaps[m][0])
            yield (
                f"components, other {modality}",
                _named(chosen | {modality: self.candidates[modality][gaps[modality][1]]}),
            )


def _axis(free: Free, positive: bool) -> np.ndarray:
    low, high = free.bounds
    if positive:
        return np.geomspace(low, high, _SCALES + 2)[1:-1]
    return np.linspace(low, high, _LAGS + 2)[1:-1]


def _named(values: Mapping[str, Mapping[str, float]]) -> Parameters:
    return {f"response/{m}/{name}": np.asarray(value) for m, own in values.items() for name, value in own.items()}


def _left(likelihood: Likelihood, pair: PairData, means: dict[tuple[str, str], np.ndarray]) -> float:
    """Share of a pair's variance that its functionals leave, by least squares."""
    seen = np.zeros((len(pair.times), likelihood.specification.n_factors))
    for run, (entry, node) in likelihood.nodes.rows[pair.key].runs.items():
        rows = likelihood.nodes.rows[pair.key].current[entry]
        seen[rows] = means[run, pair.modality][node]
    seen -= seen.mean(axis=0)
    basis = np.linalg.qr(seen)[0]
    mean, variance = _mean_and_variance(pair)
    left = 0.0
    for span, values in pair:
        centred = values - mean[span]
        if not pair.complete:
            centred = centred * _present(pair)[:, span]
        left += float(np.vdot(centred, centred) - np.sum((basis.T @ centred) ** 2))
    return left / (variance * len(pair.times))


def _other_basins(candidates: list[dict[str, float]], score: np.ndarray, best: int) -> list[int]:
    """Candidates better than all their neighbours on the grid, other than the best one."""
    places = np.array([list(one.values()) for one in candidates])
    ranks = np.stack([np.unique(column, return_inverse=True)[1] for column in places.T], axis=1)
    out = []
    for i in range(len(candidates)):
        near = np.abs(ranks - ranks[i]).max(axis=1) <= 1
        if i != best and score[i] <= score[near].min():
            out.append(i)
    return out
