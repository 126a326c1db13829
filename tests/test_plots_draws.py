"""Pictures of draws: every line, bar and mark is read back from the axes and compared with the draws."""

from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr
from scipy.stats import rankdata

mpl.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")

import msrm  # noqa: E402
from msrm import plots  # noqa: E402


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def tree() -> xr.DataTree:
    rng = np.random.default_rng(0)
    posterior = xr.Dataset(
        {
            "log_likelihood_marginal": (("chain", "draw"), rng.standard_normal((2, 50))),
            "noise": (("chain", "draw", "stream"), rng.lognormal(size=(2, 50, 2))),
            "response": (("chain", "draw", "parameter"), rng.normal(0.2, 0.1, size=(2, 50, 1))),
        },
        {"stream": ["p1/rating", "p2/rating"], "parameter": ["rating/lag"]},
    )
    return xr.DataTree.from_dict({"posterior": posterior})


def test_traces_show_every_chain_of_the_named_quantities(tree):
    axes = plots.traces(tree, ["noise[p2/rating]", "response"])
    assert [axis.get_title(loc="left") for axis in axes] == ["noise[p2/rating]", "response[rating/lag]"]
    np.testing.assert_array_equal(axes[0].lines[1].get_ydata(), tree["posterior/noise"].values[1, :, 1])
    assert len(plots.traces(tree)) == 4
    with pytest.raises(ValueError, match="no quantity 'lag'; there are log_likelihood_marginal, noise"):
        plots.traces(tree, ["lag"])
    with pytest.raises(ValueError, match="noise has no entry 'p3'; it has p1/rating"):
        plots.traces(tree, ["noise[p3]"])


def test_rank_bars_count_each_chain_s_ranks(tree):
    axis = plots.ranks(tree, ["log_likelihood_marginal"], bins=10)[0]
    values = tree["posterior/log_likelihood_marginal"].values
    ranked = rankdata(values).reshape(values.shape)
    for chain, patch in enumerate(axis.patches):
        expected = [np.sum((ranked[chain] > 10 * b) & (ranked[chain] <= 10 * (b + 1))) for b in range(10)]
        np.testing.assert_array_equal(patch.get_data().values, expected)
    assert axis.lines[0].get_ydata()[0] == 5.0


def test_response_bands_are_quantiles_of_the_curves(tree):
    response = msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.0, 1.0)))
    model = SimpleNamespace(
        responses={"rating": response, "brain": msrm.Identity()},
        responses_={"rating": msrm.Gaussian(width=0.6, lag=0.2), "brain": msrm.Identity()},
    )
    draws = SimpleNamespace(posterior=tree["posterior"].to_dataset(), model=model, ensemble=())
    bands = plots.response_bands(draws, interval=0.8)
    assert list(bands) == ["rating"]
    band = bands["rating"]
    place = int(np.argmin(np.abs(band["lag"].values - 0.5)))
    at = float(band["lag"][place])
    lags = draws.posterior["response"].values.ravel()
    heights = [msrm.Gaussian(width=0.6, lag=lag).curve(np.array([at]))[0] for lag in lags]
    expected = np.quantile(heights, (0.1, 0.5, 0.9))
    np.testing.assert_allclose([band[k][place] for k in ("lower", "median", "upper")], expected, rtol=1e-10)
    axes = plots.responses(draws)
    drawn = axes[0].collections[0].get_paths()[0].vertices
    assert drawn[:, 1].max() == pytest.approx(float(plots.response_bands(draws)["rating"]["upper"].max()))
    assert not axes[1].collections


def test_a_check_marks_statistics_outside_their_replicates():
    rng = np.random.default_rng(0)
    observed = np.array([[0.0, 1.0], [9.0, 1.0]])
    check = xr.Dataset(
        {
            "observed": (("stream_run", "statistic"), observed),
            "replicated": (("replicate", "stream_run", "statistic"), rng.normal([[0, 1], [0, 1]], 1.0, (400, 2, 2))),
        },
        {"stream_run": ["a/r/x", "b/r/x"], "statistic": ["mean", "sd"]},
    )
    axes = plots.predictive_check(check)
    assert [axis.get_title() for axis in axes] == ["mean", "sd"]
    segments = axes[0].collections[0].get_segments()
    low, high = np.quantile(check["replicated"].values[:, 1, 0], (0.05, 0.95))
    np.testing.assert_allclose(segments[1], [[low, 1], [high, 1]])
    middle, inside, outside = axes[0].lines[:3]
    np.testing.assert_allclose(middle.get_xdata(), np.median(check["replicated"].values[:, :, 0], axis=0))
    assert list(inside.get_xdata()) == [0.0]
    assert list(outside.get_xdata()) == [9.0]
    assert len(plots.predictive_check(check, statistics=["sd"], streams=["b/r/x"])) == 1
    with pytest.raises(ValueError, match="statistic 'skew' was not checked; there are mean, sd"):
        plots.predictive_check(check, statistics=["skew"])


def test_a_forest_shows_intervals_by_group_and_opens_marks_of_chains_that_disagree():
    table = xr.Dataset(
        {
            "q5": (("group", "quantity"), [[0.1], [0.2]]),
            "median": (("group", "quantity"), [[0.4], [0.6]]),
            "q95": (("group", "quantity"), [[0.7], [0.9]]),
            "r_hat": (("group", "quantity"), [[1.0], [1.3]]),
        },
        {"group": ["run-1", "run-2"], "quantity": ["response[rating/lag]"]},
    )
    axis = plots.forest(SimpleNamespace(quantities=table))[0]
    np.testing.assert_allclose(axis.collections[0].get_segments()[1], [[0.2, 1], [0.9, 1]])
    agreed, apart = axis.lines[:2]
    assert (list(agreed.get_xdata()), list(apart.get_xdata())) == ([0.4], [0.6])
    assert apart.get_markerfacecolor() == "white"
    assert [label.get_text() for label in axis.get_yticklabels()] == ["run-1", "run-2"]
    with pytest.raises(ValueError, match="no quantity 'noise'"):
        plots.forest(table, ["noise"])


def test_pictures_of_something_else_say_which_picture_draws_have():
    with pytest.raises(TypeError, match=r"groups of msrm\.sample_runs, found SimpleNamespace; .* plots\.traces"):
        plots.forest(SimpleNamespace(ensemble=()))
    with pytest.raises(TypeError, match=r"for draws use plots\.traces"):
        plots.convergence(SimpleNamespace(ensemble=()))


def test_draws_go_into_the_pictures_of_fits(tree):
    latent = xr.Dataset(
        {"mean": (("time", "factor"), np.ones((4, 1))), "variance": (("time", "factor"), np.full((4, 1), 0.25))},
        {"time": np.arange(4.0), "factor": [1]},
    )
    draws = SimpleNamespace(ensemble=(), infer_latent=lambda: xr.DataTree.from_dict({"run-1": latent}))
    band = plots.latents(draws)[0, 0].collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (0.0, 2.0)
