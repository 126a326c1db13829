"""Geweke's joint test of NUTS: a step given data, then new data given the parameters, must keep the prior.

Geweke (2004). Data are made in raw features from dense covariances, which share no code with the package, and rotated
again by it at every step, so that pivots, stand-ins of features without data, transforms, whitening and the way from a
position back to raw rows are all part of it. Adaptation is off, as after warm-up; the likelihood is the dense one.
"""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gibbs_problems import problem
from gp_oracles import IMPULSE, functional_covariance, gaussian_functional
from scipy import stats

import msrm
from msrm.diagnostics import block_statistics
from msrm.gp.data import NodeLayout, pair_data
from msrm.gp.dense import Dense
from msrm.gp.gibbs.start import state_of
from msrm.gp.likelihood import Likelihood
from msrm.gp.nuts import standins
from msrm.gp.nuts.chains import NutsJob
from msrm.gp.nuts.coordinates import Coordinates
from msrm.gp.nuts.settings import NutsSettings
from msrm.gp.nuts.standins import with_standins
from msrm.gp.nuts.start import Beginning
from msrm.gp.nuts.transforms import Scalars
from msrm.gp.nuts.whitening import Whitening
from msrm.gp.raw_rows import raw_rows
from msrm.nodes import usable_rows

FEATURES = {"brain": 9, "rating": 2}
CLOCKS = {"brain": 1.8 * np.arange(3), "rating": 1.2 * np.arange(4)}
Parameters = dict[str, np.ndarray]


class Joint:
    """The prior of parameters, and data given them, in raw features."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        small = problem(participants=1, skin=False, wide=9, rows=(3, 4), n_factors=2, step=1.2, log_noise=0.5)
        self.specification, self.grid = small.specification, small.backend

    def parameters(self) -> Parameters:
        """A draw from the prior."""
        rng, priors, out = self.rng, self.specification.priors, {}
        for modality, features in FEATURES.items():
            out[f"loading/p1/{modality}"] = priors.loading_sd * rng.standard_normal((features, 2))
            out[f"offset/p1/{modality}"] = priors.offset_sd * rng.standard_normal(features)
            out[f"noise/p1/{modality}"] = np.exp(priors.noise.mean + priors.noise.sd * rng.standard_normal(()))
        for name, free in self.specification.responses["rating"].free.items():
            out[f"response/rating/{name}"] = np.array(free.bounded_prior.quantile(rng.uniform()))
        return out

    def data(self, parameters: Parameters) -> dict[str, np.ndarray]:
        """Streams (time, feature) of new paths."""
        width, lag = (float(parameters[f"response/rating/{name}"]) for name in ("width", "lag"))
        responses = {"brain": IMPULSE, "rating": gaussian_functional(width, lag)}
        nodes = [(responses[m], t) for m, times in CLOCKS.items() for t in times]
        root = np.linalg.cholesky(functional_covariance(nodes, 2.0) + 1e-12 * np.eye(len(nodes)))
        g = root @ self.rng.standard_normal((len(nodes), 2))
        seen = {"brain": g[: len(CLOCKS["brain"])], "rating": g[len(CLOCKS["brain"]) :]}
        return {
            m: seen[m] @ parameters[f"loading/p1/{m}"].T
            + parameters[f"offset/p1/{m}"]
            + np.sqrt(parameters[f"noise/p1/{m}"]) * self.rng.standard_normal((len(CLOCKS[m]), features))
            for m, features in FEATURES.items()
        }

    def layout(self, data: dict[str, np.ndarray]) -> NodeLayout:
        """Data in the package's rotated features."""
        responses = self.specification.responses
        recording = msrm.Recording.from_dict({"p1": {"run-1": {m: (y, CLOCKS[m]) for m, y in data.items()}}})
        usable = usable_rows(recording, responses, edges="extend")
        pairs = [pair_data(recording, usable, "p1", m, reduce=True) for m in data]
        return NodeLayout.of(pairs, responses, {m: self.specification.residual(m) for m in data})


def summaries(parameters: Parameters, data: dict[str, np.ndarray]) -> np.ndarray:
    """Test functions of both that no rotation of the factors changes."""
    scalars = [float(parameters[f"response/rating/{name}"]) for name in ("width", "lag")]
    out = list(scalars)
    for m, y in data.items():
        w, b, v = (parameters[f"{kind}/p1/{m}"] for kind in ("loading", "offset", "noise"))
        power = np.log1p(np.mean(y**2))
        along = np.log1p(np.mean((y @ w) ** 2))
        out += [np.log(v), np.mean(b**2), np.mean(w**2), np.mean((w @ w.T)[0]), power, along]
        out += [np.log(v) * power, scalars[0] * power, along * scalars[1], np.mean(y.mean(axis=0) * b)]
        out += [np.log(np.mean(np.diff(y, axis=0) ** 2)) * np.log(v), np.log(np.linalg.det(w.T @ w))]
    return np.array(out)


@cache
def prior_summaries(count: int) -> np.ndarray:
    """Independent draws of the functions (draw, function)."""
    joint, out = Joint(0), []
    for _ in range(count):
        parameters = joint.parameters()
        out.append(summaries(parameters, joint.data(parameters)))
    return np.array(out)


class Simulator(Joint):
    """The successive-conditional simulator."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed)
        self.current = self.parameters()
        layout = self.layout(self.data(self.current))
        self.start = state_of(self.specification, layout, self.current)
        self.coordinates = Coordinates.of(self.specification, layout, self.start)
        self.backend = Dense(layout.groups, 2, length_scale_slope=False)
        beginning = Beginning(self.coordinates, self.prior_whitening(), self.coordinates.point(self.start)[None])
        settings = NutsSettings(max_tree_depth=7)
        job = NutsJob(layout, self.backend, self.grid, self.start, beginning, folder, 0, 1, seed, settings)
        self.kernel, self.whitening, self.count = job.kernel, beginning.whitening, 0
        self.key = jax.random.PRNGKey(seed)

    def prior_whitening(self) -> Whitening:
        """About one prior sd a unit."""
        size, degrees, sd = self.coordinates.size, self.coordinates.degrees, self.coordinates.sd
        at = self.coordinates.scalar_places
        weights, centre = np.where(degrees > 0.0, 1.0 / np.sqrt(2.0 * np.maximum(degrees, 1.0)), sd), np.zeros(size)
        weights[at] = 0.7
        centre[at] = self.coordinates.point(self.start)[at]
        places = np.arange(size)[:, None]
        return Whitening(centre, weights[:, None], places, np.zeros((size, 0)), np.zeros(0))

    def step(self) -> np.ndarray:
        """New data given the parameters, NUTS given the data; the functions of both."""
        data = self.data(self.current)
        layout, density = self.layout(data), self.kernel.density
        widths = {pair.key: 3 for pair in layout.pairs}
        assert density.host is not None
        density.host.likelihood = Likelihood(self.specification, with_standins(layout, widths), self.backend)
        z = self.whitening.inverse(self.coordinates.point(state_of(self.specification, layout, self.current)))
        self.key, own = jax.random.split(self.key)
        state = self.kernel.step(self.kernel._first(jnp.asarray(z), own, self.kernel.arguments), self.kernel.arguments)
        x = self.whitening.centre + self.whitening.moved(np.asarray(state.z))
        found = self.coordinates.state(density.parts(x[None])[0][0], self.start)
        self.count += 1
        made: Parameters = {f"response/rating/{n}": np.array(v) for n, v in found.responses["rating"].items()}
        for place, pair in enumerate(layout.pairs):
            rows = raw_rows(pair, found.rows[pair.key][None], [(self.count, place)])[0]
            made[f"loading/p1/{pair.modality}"], made[f"offset/p1/{pair.modality}"] = rows[:, :2], rows[:, 2]
            made[f"noise/p1/{pair.modality}"] = np.array(found.noise[pair.key])
        self.current = made
        return summaries(made, data)


def scores(steps: int, prior_draws: int, folder: Path, seed: int = 1) -> np.ndarray:
    """z scores between the prior and the simulator, for every function."""
    prior, chain = prior_summaries(prior_draws), Simulator(seed, folder)
    draws = np.array([chain.step() for _ in range(steps)])
    error = np.sqrt(block_statistics(draws.T[:, None, :])["mcse_mean"] ** 2 + prior.var(axis=0, ddof=1) / len(prior))
    return (draws.mean(axis=0) - prior.mean(axis=0)) / error


def limit(n_functions: int) -> float:
    """The largest |z| allowed for so many functions: family-wise 1e-4."""
    return float(stats.norm.isf(0.5e-4 / n_functions))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_geweke_joint_distribution_of_nuts(tmp_path):
    found = scores(1500, 1500, tmp_path)
    assert np.abs(found).max() < limit(len(found)), found.round(1)


def mutate(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Break one part of the density."""
    real: Any
    if name == "no Jacobian of the scalars":
        monkeypatch.setattr(Scalars, "log_slope", lambda self, x: jnp.zeros(len(self.lower)))
    elif name == "no Jacobian of the diagonals":
        real = Coordinates.log_prior
        monkeypatch.setattr(
            Coordinates, "log_prior", lambda self, x: real(self, x) - jnp.sum(jnp.where(self.degrees > 0.0, x, 0.0))
        )
    elif name == "features without data left out":
        real = standins._extended

        def extended(pair: Any, blocks: Any) -> Any:
            made = real(pair, blocks)
            made.null_counts[:] = 0
            return made

        monkeypatch.setattr(standins, "_extended", extended)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name", ["no Jacobian of the scalars", "no Jacobian of the diagonals", "features without data left out"]
)
def test_a_mutation_fails_geweke(monkeypatch, tmp_path, name):
    mutate(monkeypatch, name)
    found = scores(800, 1500, tmp_path)
    assert np.abs(found).max() > limit(len(found)), found.round(1)
