"""Tiny problems for the tests of the Gibbs sampler, and a brute-force log joint density that shares no code with it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import msrm
from msrm.gp.data import NodeLayout, pair_data
from msrm.gp.gibbs.state import Current, State
from msrm.gp.gibbs.sweep import Sweeper
from msrm.gp.parameters import FreeLengthScale, Specification
from msrm.gp.statespace import StateSpace
from msrm.gp.terms import OrnsteinUhlenbeck
from msrm.nodes import usable_rows


@dataclass
class Problem:
    """A small model on small data: `sweeper` and a `state` drawn from the prior."""

    specification: Specification
    layout: NodeLayout
    backend: StateSpace
    sweeper: Sweeper
    state: State
    recording: Any = field(repr=False, default=None)


def recording(
    seed: int,
    *,
    runs: int = 1,
    wide: int = 9,
    missing: float = 0.0,
    participants: int = 2,
    skin: bool = True,
    rows: tuple[int, int] = (5, 7),
) -> Any:
    """A wide Identity stream (more features than rows in one run) and two filtered ones on other clocks."""
    rng = np.random.default_rng(seed)
    data: dict[str, dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]] = {}
    for p in range(participants):
        for r in range(runs):
            streams = {"brain": (1.8 * np.arange(rows[0] + r), wide), "rating": (1.2 * np.arange(rows[1]), 2)}
            if p == 0 and skin:
                streams["skin"] = (1.5 * np.arange(6) + 0.2, 1)
            for name, (times, features) in streams.items():
                values = rng.standard_normal((len(times), features)) + 0.4
                if missing:
                    gone = rng.uniform(size=values.shape) < missing
                    gone[:, 0] = False
                    values[gone] = np.nan
                data.setdefault(f"p{p + 1}", {}).setdefault(f"run-{r + 1}", {})[name] = (values, times)
    return msrm.Recording.from_dict(data)


def responses() -> dict[str, Any]:
    """Identity, a Gaussian and a Gamma with free parameters."""
    return {
        "brain": msrm.Identity(),
        "rating": msrm.Gaussian(
            width=msrm.Free(0.6, bounds=(0.3, 1.2), prior=msrm.LogNormal(-0.5, 0.3)),
            lag=msrm.Free(0.2, bounds=(-1.0, 1.0), prior=msrm.Normal(0.1, 0.5)),
        ),
        "skin": msrm.Gamma(shape=2.5, scale=msrm.Free(0.4, bounds=(0.2, 0.8)), lag=0.1),
    }


def problem(
    *,
    seed: int = 1,
    n_factors: int = 2,
    runs: int = 1,
    wide: int = 9,
    missing: float = 0.0,
    reduce: bool = True,
    step: float = 0.6,
    residual: bool = True,
    run_offsets: bool = False,
    ou: bool = False,
    powers: bool = False,
    free_length_scale: bool = False,
    participants: int = 2,
    skin: bool = True,
    rows: tuple[int, int] = (5, 7),
    log_noise: float = -0.5,
) -> Problem:
    """A problem with every part that the arguments ask for."""
    made = recording(seed, runs=runs, wide=wide, missing=missing, participants=participants, skin=skin, rows=rows)
    families = {name: response for name, response in responses().items() if name in made.modalities}
    residuals = {"rating": OrnsteinUhlenbeck(msrm.Free(2.0, bounds=(0.5, 9.0)))} if ou else {}
    specification = Specification(
        n_factors,
        families,
        FreeLengthScale(2.0, msrm.LogNormal(0.7, 0.3).bounded(0.8, 6.0)) if free_length_scale else 2.0,
        msrm.Priors(noise=msrm.LogNormal(log_noise, 0.6), loading_sd=0.9, offset_sd=1.3, run_offset_sd=0.7),
        residuals=residuals,
        powers={"rating": 0.6} if powers else {},
        run_offsets=frozenset(families) if run_offsets else frozenset(),
    )
    usable = usable_rows(made, families, edges="extend")
    pairs = [pair_data(made, usable, p, m, reduce=reduce) for p, m in made.pairs]
    layout = NodeLayout.of(pairs, families, {m: specification.residual(m) for m in made.modalities})
    backend = StateSpace(layout.groups, n_factors, step)
    if residual:
        backend = backend.with_residual(backend.off_grid[0] | backend.off_grid[1])
    sweeper = Sweeper(specification, layout, backend)
    return Problem(specification, layout, backend, sweeper, prior_state(specification, layout, seed), made)


def prior_state(specification: Specification, layout: NodeLayout, seed: int) -> State:
    """Parameters drawn from the prior, null rows included."""
    rng, priors = np.random.default_rng(seed + 100), specification.priors
    rows, noise = {}, {}
    for pair in layout.pairs:
        columns = 1 + (len(pair.rows) if pair.modality in specification.run_offsets else 0)
        sds = np.r_[np.full(specification.n_factors, priors.loading_sd), priors.offset_sd]
        sds = np.r_[sds, np.full(columns - 1, priors.run_offset_sd)]
        parts = [rng.standard_normal((pair.n_coordinates, len(sds))) * sds]
        for count in pair.null_counts[pair.null_counts > 0]:
            null = rng.standard_normal((count, len(sds))) * sds
            parts.append(np.linalg.cholesky(null.T @ null + 1e-12 * np.eye(len(sds))).T)
        rows[pair.key] = np.concatenate(parts)
        noise[pair.key] = float(priors.noise.sample(rng))
    values = {
        modality: {name: float(free.bounded_prior.sample(rng)) for name, free in response.free.items()}
        for modality, response in specification.responses.items()
    }
    free = specification.length_scale
    scale = float(free.prior.sample(rng)) if isinstance(free, FreeLengthScale) else float(free)
    times = {
        m: r.start if isinstance(r := specification.residual(m), OrnsteinUhlenbeck) else np.nan
        for m in dict.fromkeys(pair.modality for pair in layout.pairs)
    }
    return State(rows, noise, values, scale, times)


def state_covariance(times: np.ndarray, length_scale: float) -> np.ndarray:
    """Covariance of (f, f'/rate) at times, Matern-3/2, ordered by time and then state."""
    rate = np.sqrt(3.0) / length_scale
    lag = rate * (times[None, :] - times[:, None])
    r = np.abs(lag)
    out = np.empty((len(times), 2, len(times), 2))
    out[:, 0, :, 0] = (1 + r) * np.exp(-r)
    out[:, 0, :, 1] = -lag * np.exp(-r)
    out[:, 1, :, 0] = lag * np.exp(-r)
    out[:, 1, :, 1] = (1 - r) * np.exp(-r)
    return out.reshape(2 * len(times), -1)


def rows_matrix(posterior: Any, modality: str) -> np.ndarray:
    """Functional weights of a modality as a dense matrix (node, state)."""
    return posterior.nodes[modality].rows.matrix.toarray()


def residual_of(posterior: Any, modality: str) -> np.ndarray:
    """Residual variances in use, (node,); zeros where the backend does not use them."""
    terms = posterior.nodes[modality]
    return terms.made.residual if hasattr(terms, "shrink") else np.zeros(len(terms.rows))


def log_normal(x: np.ndarray, covariance: np.ndarray) -> float:
    """Log density of N(0, covariance) summed over columns of x."""
    columns = x.shape[1] if x.ndim == 2 else 1
    value = np.linalg.slogdet(2 * np.pi * covariance)[1] * columns
    return -0.5 * (value + float(np.sum(x * np.linalg.solve(covariance, x))))


def log_joint(problem: Problem, current: Current) -> float:
    """Log density of data, functionals, states, rows and noise, term by term (responses and timescales held).

    Null rows enter through their Gram matrix as rows would: their prior, their data of zeros; constants in their
    number only. Needs white residuals.
    """
    specification, state = problem.specification, current.state
    size, priors, total = specification.n_factors, specification.priors, 0.0
    for run, states in current.states.items():
        posterior = current.posteriors[run]
        total += log_normal(states, state_covariance(posterior.grid.times, state.length_scale))
        for modality, functionals in current.functionals[run].items():
            rho = residual_of(posterior, modality)
            error = functionals - rows_matrix(posterior, modality) @ states
            used = rho > 0
            total -= 0.5 * float(np.sum(error[used] ** 2 / rho[used, None]))
    for pair in problem.layout.pairs:
        rows, v = state.rows[pair.key], state.noise[pair.key]
        own = pair.n_coordinates
        power = specification.power(pair.modality)
        total -= 0.5 * float(np.sum(rows[:, :size] ** 2)) / priors.loading_sd**2
        total -= 0.5 * float(np.sum(rows[:, size] ** 2)) / priors.offset_sd**2
        total -= 0.5 * float(np.sum(rows[:, size + 1 :] ** 2)) / priors.run_offset_sd**2
        total += float(priors.noise.log_density(v))
        values = np.concatenate([block for _, block in pair], axis=1)
        spare = np.flatnonzero(pair.null_counts)
        pattern = np.concatenate([pair.pattern, np.repeat(spare, rows.shape[1])])
        present = pair.patterns[pattern].T
        data = np.hstack([values, np.zeros((len(values), rows.shape[1] * len(spare)))])
        for place, (run, span) in enumerate(pair.rows.items()):
            times = problem.layout.groups[run][pair.modality].times
            g = current.functionals[run][pair.modality][np.searchsorted(times, pair.times[span])]
            mean = g @ rows[:, :size].T + rows[:, size]
            if rows.shape[1] > size + 1:
                mean = mean + rows[:, size + 1 + place]
            total -= 0.5 * power / v * float(np.sum((data[span] - mean)[present[span]] ** 2))
            scalars = float(present[span][:, :own].sum()) + float(pair.null_counts @ pair.patterns[:, span].sum(1))
            total -= 0.5 * power * scalars * np.log(2 * np.pi * v)
    return total


class Scripted:
    """A stand-in for a random generator that returns prepared normals and uniforms."""

    def __init__(self, normals: list[Any], uniforms: list[float] | None = None) -> None:
        self.normals, self.uniforms = list(normals), list(uniforms or [])

    def standard_normal(self, size: Any = None) -> Any:
        """The next prepared normals, of the wanted shape."""
        value = self.normals.pop(0)
        return value if size is None else np.broadcast_to(np.asarray(value, float), size).copy()

    def uniform(self, size: Any = None) -> float:
        """The next prepared uniform."""
        return self.uniforms.pop(0)


def affine_moments(draw: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of ``draw(normals)`` that is affine in standard normals of a shape."""
    mean = np.ravel(draw(np.zeros(shape)))
    size = int(np.prod(shape))
    columns = [np.ravel(draw(unit.reshape(shape))) - mean for unit in np.eye(size)]
    root = np.array(columns).T
    return mean, root @ root.T
