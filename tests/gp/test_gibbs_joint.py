"""The whole Gibbs sweep: Geweke's joint test, the order of its steps on sharp data, and what breaking it does.

Geweke (2004): alternate a sweep given data with new data given parameters and latents; the parameters must then keep
their prior. New data are drawn in raw features and rotated again, so the null block is tested with the rest. Every
mutation listed here must be caught by the test it names.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from gibbs_problems import Problem, prior_state, problem, rows_matrix, state_covariance
from scipy import stats

import msrm
from msrm.diagnostics import block_statistics
from msrm.gp.data import NodeLayout, pair_data
from msrm.gp.gibbs import sweep
from msrm.gp.gibbs.design import Design
from msrm.gp.gibbs.latents import draw_functionals, draw_states
from msrm.gp.gibbs.state import Current, State
from msrm.gp.gibbs.sweep import Sweeper
from msrm.gp.parameters import Specification
from msrm.gp.statespace import StateSpace
from msrm.nodes import usable_rows


class Geweke:
    """The successive-conditional simulator of one problem, in raw features."""

    def __init__(self, small: Problem, seed: int) -> None:
        self.small, self.rng = small, np.random.default_rng(seed)
        self.blank = Design.of(small.specification, small.layout, small.state.timescales)
        self.state = prior_state(small.specification, small.layout, seed)
        self.raw = {pair.key: self.raw_rows(pair.key, self.state.rows[pair.key], None) for pair in small.layout.pairs}
        start = small.sweeper.start(self.state)
        nothing = {
            run: {m: replace(g, precision=0 * g.precision, information=0 * g.information) for m, g in groups.items()}
            for run, groups in start.statistics.items()
        }
        self.functionals = {}
        for run, given in nothing.items():
            posterior = small.sweeper.marginal.posterior(run, self.state, given)
            self.functionals[run] = draw_functionals(self.rng, posterior, draw_states(self.rng, posterior))

    def raw_rows(self, key, rows: np.ndarray, basis: np.ndarray | None) -> np.ndarray:
        """Rows of raw features: those with data turned back, null rows in a fresh uniform position."""
        pair = self.blank.pairs[key]
        own = pair.pair.n_coordinates
        if not pair.null:
            return rows
        count, (span,) = int(pair.pair.null_counts.sum()), pair.null.values()
        if basis is None:
            basis = np.linalg.qr(self.rng.standard_normal((own + count, own)))[0]
        outside = self.rng.standard_normal((own + count, rows.shape[1]))
        outside -= basis @ (basis.T @ outside)
        left, _, right = np.linalg.svd(outside, full_matrices=False)
        return basis @ rows[:own] + left @ right @ rows[span]

    def step(self, *, tune: bool = False) -> Current:
        """New data given everything, then a sweep given the data."""
        small, rng = self.small, self.rng
        pairs, rows, bases = {}, {}, {}
        for key, pair in self.blank.pairs.items():
            x = pair.matrix({run: self.functionals[run][key[1]] for run in pair.nodes})
            noise = np.sqrt(self.state.noise[key])
            y = x @ self.raw[key].T + noise * rng.standard_normal((len(x), len(self.raw[key])))
            rows[key], values, bases[key] = self.raw[key], y, None
            if pair.null:
                left, spread, right = np.linalg.svd(y, full_matrices=False)
                bases[key] = right.T
                inside = right @ self.raw[key]
                rest = self.raw[key] - right.T @ inside
                factor = np.linalg.cholesky(rest.T @ rest + 1e-13 * np.eye(rest.shape[1]))
                rows[key] = np.vstack([inside, factor.T])
                values = np.hstack([left * spread, np.zeros((len(y), len(factor)))])
            pairs[key] = replace(pair, values=values)
        design = replace(self.blank, pairs=pairs)
        current = small.sweeper.marginal.current(replace(self.state, rows=rows), design)
        current = small.sweeper.sweep(rng, current, tune=tune)
        self.state, self.functionals = current.state, current.functionals
        self.raw = {key: self.raw_rows(key, current.state.rows[key], bases[key]) for key in pairs}
        return current


def summaries(small: Problem, state: State, raw: dict, functionals: dict) -> np.ndarray:
    """Test functions: log v, squared offsets, entries of W W', responses, latent power, and products of them."""
    size = small.specification.n_factors
    out = [np.log(v) for v in state.noise.values()]
    out += [np.mean(rows[:, size] ** 2) for rows in raw.values()]
    grams = [rows[:, :size] @ rows[:, :size].T for rows in raw.values()]
    out += [np.trace(gram) / len(gram) for gram in grams] + [np.mean(gram) for gram in grams]
    scalars = [value for values in state.responses.values() for value in values.values()]
    scalars += [value for value in state.timescales.values() if np.isfinite(value)] + [state.length_scale]
    out += scalars
    nodes = [(run, modality, g) for run, groups in functionals.items() for modality, g in groups.items()]
    out += [np.mean(g**2) for _, _, g in nodes] + [np.mean(np.diff(g, axis=0) ** 2) for _, _, g in nodes]
    for key, rows in raw.items():
        g = functionals[next(run for run in functionals if key[1] in functionals[run])][key[1]]
        fit = np.mean((g @ rows[:, :size].T) ** 2)
        level = np.mean(g.mean(axis=0) @ rows[:, :size].T * rows[:, size])
        out += [np.log1p(fit), np.log1p(fit) * scalars[0], np.log(state.noise[key]) * np.log1p(fit), level]
    return np.array(out)


@cache
def prior_summaries(count: int) -> np.ndarray:
    """The same functions of the tiny problem under the prior, independent draws (draw, function)."""
    small = tiny()
    chains = (Geweke(small, 5000 + i) for i in range(count))
    return np.array([summaries(small, one.state, one.raw, one.functionals) for one in chains])


def geweke_scores(sweeps: int, prior_draws: int, seed: int = 1) -> np.ndarray:
    """z scores between the prior and the successive-conditional simulator of the tiny problem, for every function."""
    prior, small = prior_summaries(prior_draws), tiny()
    chain, found = Geweke(small, seed), []
    # Steps of a size that data as weak as these allow; fixed, as after warm-up.
    for proposal in small.sweeper.proposals:
        proposal.walk.forget(10.0)
    for _ in range(sweeps):
        chain.step()
        found.append(summaries(small, chain.state, chain.raw, chain.functionals))
    draws = np.array(found)
    moving = prior.std(axis=0) > 0
    statistics = block_statistics(draws.T[moving][:, None, :])
    error = np.sqrt(statistics["mcse_mean"] ** 2 + prior.var(axis=0, ddof=1)[moving] / len(prior))
    return (draws.mean(axis=0) - prior.mean(axis=0))[moving] / error


def limit(n_functions: int) -> float:
    """The largest |z| allowed for so many functions: family-wise 1e-4."""
    return float(stats.norm.isf(0.5e-4 / n_functions))


def tiny() -> Problem:
    """A wide Identity stream and a filtered one on a coarse grid: little data, so that the simulator mixes."""
    return problem(participants=1, skin=False, wide=7, rows=(3, 4), n_factors=2, step=1.2, log_noise=0.5)


def test_geweke_joint_distribution_of_a_tiny_problem():
    scores = geweke_scores(sweeps=400, prior_draws=200)
    assert np.abs(scores).max() < limit(len(scores)), scores.round(1)


# The order of steps (1) and (2)


class Sharp:
    """One Identity and one filtered feature, noise and offsets all but known: the posterior of three numbers.

    They are both loadings and the width of the response, which trade against each other; data are sharp.
    """

    NOISE = 0.02

    def __init__(self) -> None:
        rng = np.random.default_rng(4)
        slow, fast = 0.8 * np.arange(12), 0.7 * np.arange(14) + 0.1
        path = 1.2 * np.sin(slow / 1.3), 1.2 * np.sin(fast / 1.3)
        noisy = [f + np.sqrt(self.NOISE) * rng.standard_normal(f.shape) for f in (path[0], 0.9 * path[1])]
        streams = {"brain": (noisy[0][:, None], slow), "rating": (noisy[1][:, None], fast)}
        recording = msrm.Recording.from_dict({"p1": {"run-1": streams}})
        width = msrm.Free(0.4, bounds=(0.15, 1.0), prior=msrm.LogNormal(-0.9, 0.4))
        families = {"brain": msrm.Identity(), "rating": msrm.Gaussian(width=width, lag=0.0)}
        noise = msrm.LogNormal(np.log(self.NOISE), 1e-4)
        self.specification = Specification(1, families, 2.0, msrm.Priors(noise=noise, loading_sd=1.0, offset_sd=1e-4))
        usable = usable_rows(recording, families, edges="extend")
        pairs = [pair_data(recording, usable, p, m, reduce=True) for p, m in recording.pairs]
        self.layout = NodeLayout.of(pairs, families, {m: self.specification.residual(m) for m in families})
        self.backend = StateSpace(self.layout.groups, 1, 0.4)
        self.data = {pair.modality: np.concatenate([block for _, block in pair], axis=1)[:, 0] for pair in pairs}

    def start(self) -> State:
        rows = {("p1", m): np.array([[0.8, 0.0]]) for m in ("brain", "rating")}
        noise = dict.fromkeys(rows, self.NOISE)
        return State(rows, noise, {"brain": {}, "rating": {"width": 0.4}}, 2.0, {"brain": np.nan, "rating": np.nan})

    @staticmethod
    def logarithms(width: np.ndarray, w1: np.ndarray, w2: np.ndarray) -> np.ndarray:
        """What a flip of sign does not touch: log width and both log absolute loadings."""
        return np.array([np.log(width), np.log(np.abs(w1)), np.log(np.abs(w2))])

    @staticmethod
    def deviations(logs: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
        """Moments (draw, function) that are zero if logs (draw, 3) have the exact mean and covariance."""
        apart = logs - mean
        products = apart[:, :, None] * apart[:, None, :] - covariance
        return np.hstack([apart, products[:, *np.triu_indices(3)]])

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of the logarithms on a grid, the marginal density by dense normals."""
        sweeper = Sweeper(self.specification, self.layout, self.backend)
        widths, w1, w2 = np.exp(np.linspace(-1.85, -0.02, 41)), np.linspace(0.2, 2.6, 49), np.linspace(0.15, 2.4, 49)
        y = np.concatenate([self.data["brain"], self.data["rating"]])
        n = len(self.data["brain"])
        log_density = np.empty((len(widths), len(w1), len(w2)))
        prior = msrm.LogNormal(-0.9, 0.4).bounded(0.15, 1.0)
        for i, width in enumerate(widths):
            state = replace(self.start(), responses={"brain": {}, "rating": {"width": float(width)}})
            posterior = sweeper.start(state).posteriors["run-1"]
            rows = np.concatenate([rows_matrix(posterior, m) for m in ("brain", "rating")])
            unit = rows @ state_covariance(posterior.grid.times, 2.0) @ rows.T
            a, b = (w.ravel() for w in np.meshgrid(w1, w2, indexing="ij"))
            scale = np.concatenate([np.repeat(a[:, None], n, 1), np.repeat(b[:, None], len(y) - n, 1)], axis=1)
            covariance = scale[:, :, None] * unit * scale[:, None, :] + self.NOISE * np.eye(len(y))
            solved = np.linalg.solve(covariance, np.broadcast_to(y[:, None], (len(a), len(y), 1)))[..., 0]
            value = -0.5 * np.linalg.slogdet(covariance)[1] - 0.5 * solved @ y - 0.5 * (a**2 + b**2)
            log_density[i] = (value + prior.log_density(width) + np.log(width)).reshape(len(w1), len(w2))
        weight = np.exp(log_density - log_density.max())
        weight /= weight.sum()
        mesh = np.meshgrid(widths, w1, w2, indexing="ij")
        logs = self.logarithms(*mesh)
        mean = np.einsum("fabc,abc->f", logs, weight)
        apart = logs - mean[:, None, None, None]
        return mean, np.einsum("fabc,gabc,abc->fg", apart, apart, weight, optimize=True)

    def scores(self, kind: type[Sweeper], sweeps: int) -> np.ndarray:
        """z scores of a chain's moments against the exact ones."""
        sweeper, rng = kind(self.specification, self.layout, self.backend), np.random.default_rng(0)
        current, draws = sweeper.start(self.start()), []
        for i in range(200 + sweeps):
            finished = sweeper.sweep(rng, current, tune=i < 200)
            if i in (50, 150):
                sweeper.end_window()
            rows = finished.state.rows
            width, w1, w2 = finished.state.responses["rating"]["width"], rows["p1", "brain"], rows["p1", "rating"]
            draws.append(self.logarithms(np.array(width), w1[0, 0], w2[0, 0]))
            current = sweeper.marginal.current(finished.state, finished.design)
        kept = self.deviations(np.array(draws[200:]), *self.exact())
        return kept.mean(axis=0) / block_statistics(kept.T[:, None, :])["mcse_mean"]


class WrongOrder(Sweeper):
    """Latents drawn before the response: the density given old paths is then not the one that rows are drawn from."""

    def sweep(self, rng: np.random.Generator, current: Current, *, tune: bool) -> Current:
        self.draw_latents(rng, current)
        old = current
        for block, proposal in zip(self.blocks, self.proposals, strict=True):
            current = self.marginal.step(rng, current, block, proposal, tune=tune)
        if current is not old:
            current.states, current.functionals = old.states, old.functionals
        self.draw_rows(rng, current)
        self.draw_noise(rng, current)
        self.move(rng, current)
        return current


def test_sweep_order_on_sharp_data():
    scores = Sharp().scores(Sweeper, 700)
    assert np.abs(scores).max() < limit(len(scores)), scores.round(1)


@pytest.mark.slow
def test_a_broken_sweep_order_fails_the_test_on_sharp_data():
    scores = Sharp().scores(WrongOrder, 3000)
    assert np.abs(scores).max() > limit(len(scores)), scores.round(1)


# Mutations, each caught by Geweke's test


def prior_null(rng, gram, prior, noise, count):
    """Null rows from their prior instead of their conditional."""
    return real_null(rng, 0.0 * gram, prior, noise, count)


real_null = sweep.draw_null_factor
real_noise = sweep.draw_noise


def mutate(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Break one step of the sampler."""
    if name == "null rows from the prior":
        monkeypatch.setattr(sweep, "draw_null_factor", prior_null)
    elif name == "null rows left out of the noise step":
        monkeypatch.setattr(
            sweep, "draw_noise", lambda rng, count, *rest: real_noise(rng, count - (12.0 if count > 15 else 0.0), *rest)
        )
    elif name == "Jacobian of the scale move":
        monkeypatch.setattr(Design, "feature_rows", {"brain": 0, "rating": 0})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "null rows from the prior",
        "null rows left out of the noise step",
        "Jacobian of the scale move",
    ],
)
def test_a_mutation_fails_geweke(monkeypatch, name):
    mutate(monkeypatch, name)
    scores = geweke_scores(sweeps=1000, prior_draws=2000)
    assert np.abs(scores).max() > limit(len(scores)), scores.round(1)


@pytest.mark.slow
def test_geweke_joint_distribution():
    scores = geweke_scores(sweeps=8000, prior_draws=2000, seed=2)
    assert np.abs(scores).max() < limit(len(scores)), scores.round(1)
