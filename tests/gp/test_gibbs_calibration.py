"""The Gibbs sampler against what it must reproduce: truths drawn from the prior, and importance-corrected Laplace."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from laplace_oracle import check_moments, laplace_problem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def calibration():
    """The benchmark of the same name, whose replicates are tiny."""
    spec = importlib.util.spec_from_file_location("calibration", BENCHMARKS / "calibration.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "calibration", module)
        spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_simulation_based_calibration_of_the_smallest_problem():
    made = calibration()
    records = [made.ranks(r, "K = 1", warmup=150, kept=19, thin=8) for r in range(50)]
    report, _ = made.rank_report(records)
    assert report["largest_grid_error_nats"] < 0.1
    # Family-wise level of about 0.01 over all quantities.
    assert report["smallest_p"] > 0.01 / report["quantities"], report["p"]


def test_tails_of_ranks_find_what_is_not_uniform():
    made, rng = calibration(), np.random.default_rng(0)
    null = made.null_tails(100, 19, simulations=1000)
    shifted = np.minimum(rng.integers(0, 20, (1, 100)) + rng.integers(0, 8, (1, 100)), 19)
    narrow = 5 + rng.integers(0, 10, (1, 100))
    for wrong in (shifted, narrow):
        assert np.mean(null <= made.smallest_tail(wrong, 19)[0]) < 0.01
    # Under the null the tails are uniform enough to be p values.
    fresh = made.smallest_tail(rng.integers(0, 20, (300, 100)), 19)
    assert np.mean(fresh < np.quantile(null, 0.1)) == pytest.approx(0.1, abs=0.06)


@pytest.mark.slow
def test_gibbs_agrees_with_importance_corrected_laplace():
    model, recording = laplace_problem()
    fit = model.fit(recording)
    draws = fit.sample(recording, chains=2, warmup=400, draws=1500, seed=1, progress=False)
    check_moments(draws, fit, recording)
