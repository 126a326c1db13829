"""What warm-up settles: the grid that chains run on, and the coin between independence proposals and walks."""

import numpy as np
import pytest
from gibbs_problems import problem
from scipy import stats

from msrm.gp.gibbs import grid
from msrm.gp.gibbs.chains import dispersed
from msrm.gp.gibbs.grid import sampling_grid
from msrm.gp.gibbs.proposals import BlockProposal
from msrm.gp.gibbs.start import within_bounds
from msrm.gp.gibbs.sweep import Sweeper


def spread(small, backend) -> float:
    """How much the error varies between states from the prior, against a spacing four times finer."""
    fine = Sweeper(small.specification, small.layout, backend.at_step(backend.step / 4))
    coarse = Sweeper(small.specification, small.layout, backend)
    states = [problem(seed=seed, wide=9).state for seed in range(12)]
    return float(np.std([coarse.start(s).log_likelihood - fine.start(s).log_likelihood for s in states]))


def test_the_grid_is_refined_until_its_error_hardly_varies():
    small = problem(step=1.8)
    found = [
        sampling_grid(small.specification, small.layout, small.backend, small.state, tolerance)
        for tolerance in (100.0, 0.02)
    ]
    assert found[0].step == small.backend.step
    assert found[1].step < small.backend.step
    assert spread(small, found[1]) < 0.3 * spread(small, found[0])


def test_a_grid_that_cannot_be_fine_enough_is_an_error(monkeypatch):
    monkeypatch.setattr(grid, "_ROUNDS", 2)
    small = problem(step=1.8)
    with pytest.raises(FloatingPointError, match=r"still varies by .* raise likelihood_tolerance"):
        sampling_grid(small.specification, small.layout, small.backend, small.state, 0.0)


def chain(proposal: BlockProposal, log_density, sweeps: int, *, tune: bool) -> np.ndarray:
    """A Metropolis chain of one coordinate."""
    rng, x, out = np.random.default_rng(3), np.zeros(1), np.empty(sweeps)
    for i in range(sweeps):
        there, log_ratio, walked = proposal.propose(rng, x)
        probability = float(np.exp(min(0.0, log_ratio + log_density(there) - log_density(x))))
        x = there if rng.uniform() < probability else x
        if tune:
            proposal.learn(x, probability, walked)
            if i in (200, 600, 1200):
                proposal.fit()
        out[i] = x[0]
    return out


def test_independence_proposals_are_preferred_where_they_fit_and_keep_the_density():
    def log_density(x):
        return -0.5 * float((x[0] - 1.0) / 0.4) ** 2

    proposal = BlockProposal(np.array([0.1]))
    chain(proposal, log_density, 1500, tune=True)
    assert proposal.share == 0.9
    draws = chain(proposal, log_density, 8000, tune=False)
    assert stats.kstest(draws[::4], stats.norm(1.0, 0.4).cdf).pvalue > 1e-3
    restored = BlockProposal(np.array([0.1]))
    restored.load(proposal.arrays())
    np.testing.assert_array_equal(chain(restored, log_density, 50, tune=False), draws[:50])


def test_walks_keep_half_of_the_steps_where_independence_fails():
    def log_density(x):
        # Two far and narrow modes: a density fitted to both is hardly ever accepted.
        return float(np.logaddexp(-0.5 * (x[0] / 0.01) ** 2, -0.5 * ((x[0] - 5.0) / 0.01) ** 2))

    proposal = BlockProposal(np.array([0.01]))
    proposal.root, proposal.mean, proposal.fitted = np.array([[2.5]]), np.array([2.5]), True
    chain(proposal, log_density, 201, tune=True)
    assert proposal.share == 0.5


def test_chains_leave_the_bounds_that_a_map_lies_on():
    small = problem(ou=True, free_length_scale=True)
    at_bounds = small.state
    for place, block in enumerate(small.sweeper.blocks):
        for name, prior in zip(block.names, block.priors, strict=True):
            at_bounds = at_bounds.with_parameter(name, prior.upper if place % 2 else prior.lower)
    start = within_bounds(small.specification, at_bounds)
    for block in small.sweeper.blocks:
        assert np.isfinite(block.log_density(block.coordinates(start)))
        np.testing.assert_allclose(block.coordinates(start), block.coordinates(at_bounds), atol=1e-4)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        sweeper = Sweeper(small.specification, small.layout, small.backend)
        state = dispersed(rng, start, sweeper)
        current, seen = sweeper.start(state), []
        for _ in range(40):
            finished = sweeper.sweep(rng, current, tune=True)
            current = sweeper.marginal.current(finished.state, finished.design)
            seen.append(np.concatenate([block.coordinates(finished.state) for block in sweeper.blocks]))
        assert (np.ptp(seen, axis=0) > 0.0).all()
