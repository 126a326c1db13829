"""Draws of NUTS: against the Gibbs sampler and importance sampling, together and in processes, as archives."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from laplace_oracle import check_moments, laplace_problem
from nuts_problems import check_agreement, interrupted_after, tiny

import msrm
from msrm.gp.gibbs.start import state_of
from msrm.gp.nuts.chains import run_together
from msrm.gp.nuts.sampler import NutsRun
from msrm.gp.nuts.settings import NutsSettings
from msrm.gp.storage import DrawStore

pytestmark = pytest.mark.slow

PROBLEMS: dict[str, dict[str, Any]] = {
    "K = 1, dense": {"n_factors": 1, "likelihood": "dense"},
    "K = 2": {"n_factors": 2},
    "K = 3": {"n_factors": 3},
    "masked": {"n_factors": 2, "missing": 0.2},
    "two runs": {"n_factors": 2, "runs": 2},
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_nuts_and_gibbs_agree(kind):
    gp, recording = tiny(**kind)
    gibbs = gp.sample(recording, chains=2, warmup=300, draws=1000, seed=3, n_jobs=1, progress=False)
    nuts = gp.sample(recording, sampler="nuts", chains=2, warmup=150, draws=250, seed=4, progress=False)
    check_agreement(nuts, gibbs)
    summary = nuts.summary()
    assert summary.sampler["divergences"] == 0
    assert not nuts.tree["sample_stats"]["reached_max_tree_depth"].any()
    assert (summary.sampler["bfmi"] > 0.3).all()


@pytest.mark.timeout(1800)
def test_nuts_agrees_with_importance_corrected_laplace():
    model, recording = laplace_problem()
    fit = model.fit(recording)
    draws = fit.sample(recording, sampler="nuts", chains=2, warmup=150, draws=500, seed=1, progress=False)
    check_moments(draws, fit, recording)


TOGETHER = """
    import sys
    sys.path[:0] = [{tests!r}]
    import numpy as np
    from nuts_problems import tiny
    gp, recording = tiny()
    options = dict(sampler="nuts", chains=2, warmup=4, seed=3, progress=False)
    whole = gp.sample(recording, chain_method={whole!r}, draws=3, **options)
    gp.sample(recording, chain_method={method!r}, draws=2, path="run", **options)
    longer = gp.sample(recording, chain_method={method!r}, draws=3, path="run", resume=True, **options)
    assert whole.posterior.sizes["chain"] == 2
    for group in ("posterior", "sample_stats"):
        one, other = (draws.tree[group].to_dataset() for draws in (whole, longer))
        for name in one.data_vars:
            assert np.isfinite(one[name]).all(), name
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    for key, rows in whole.rows.items():
        np.testing.assert_array_equal(rows, longer.rows[key])
    print("done")
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("whole", "method"), [("vectorized", "vectorized"), ("sequential", "processes")])
def test_chains_that_are_extended_keep_every_bit_and_do_not_deadlock(tmp_path, whole, method):
    """A host callback can block on few cores: a child with a hard limit. Processes draw what one process does."""
    script = textwrap.dedent(TOGETHER.format(tests=str(Path(__file__).parent), whole=whole, method=method))
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=1000, check=False, cwd=tmp_path
    )
    assert child.stdout.strip().endswith("done"), child.stderr[-2000:]


@pytest.mark.timeout(1200)
def test_chains_in_step_continue_bit_for_bit_when_one_is_ahead(tmp_path):
    gp, recording = tiny()
    likelihood, _ = gp.prepared(recording, reduce=True)
    start = state_of(likelihood.specification, likelihood.nodes, gp.model_.parameters)
    run = NutsRun.of(gp, likelihood, likelihood.backend.at_step(gp.model_.step), start, NutsSettings())
    options = {"chains": 2, "warmup": 4, "draws": 4, "seed": 7}
    job = run.job(DrawStore.create(tmp_path / "whole", {}), **options)
    assert run_together(job, 2) == [4, 4]
    again = run.job(DrawStore.create(tmp_path / "parts", {}), **options)
    again.__dict__["kernel"] = job.kernel
    for steps in (3, 5, 4):  # the first chain is a step ahead in warm-up and among draws; then both stand alike
        with interrupted_after(steps):
            run_together(again, 2)
    assert run_together(again, 2) == [4, 4]
    for index in range(2):
        wanted, found = (DrawStore(one.folder).chain(index).read() for one in (job, again))
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.timeout(1200)
def test_draws_of_nuts_are_an_archive_and_answer(tmp_path):
    gp, recording = tiny(runs=2)
    options = {"sampler": "nuts", "chains": 2, "warmup": 8, "draws": 6, "seed": 1, "progress": False}
    draws = gp.sample(recording, **options)
    again = msrm.open_fit(draws.save(tmp_path / "draws.nc"))
    assert isinstance(again, msrm.Draws)
    for group in ("posterior", "sample_stats", "log_likelihood"):
        xr.testing.assert_identical(again.tree[group].to_dataset(), draws.tree[group].to_dataset())
    assert again.tree.attrs["metric"] == "diagonal"
    asked = {"targets": {"p1": ["rating"]}, "noise": True}
    one, other = (each.predict(recording, **asked)["p1/run-2/rating"].to_dataset() for each in (draws, again))
    xr.testing.assert_identical(one, other)
    assert (one["variance"] > 0).all()
    np.testing.assert_allclose(again.loading("p2", "brain"), draws.loading("p2", "brain"), rtol=1e-9, atol=1e-11)
    sampled = msrm.SampledGPMSRM(gp, sampler="nuts", chains=1, warmup=5, draws=4, progress=False)
    asked = {"hold_out": "runs", "targets": {"p1": ["rating"]}, "n_shifts": 0, "progress": False}
    report = msrm.evaluate(sampled, recording, **asked).sel(stream="p1/rating", predictor="fit")
    assert np.isfinite(report["log_density"])
    assert (np.diff(report["coverage"]) >= 0.0).all()
