"""msrm.diagnostics: equal to ArviZ to rounding, and never "converged" for chains that are constant, stuck or NaN."""

import numpy as np
import pytest
import xarray as xr
from arviz_stats import ess as azs_ess
from arviz_stats import rhat as azs_rhat
from arviz_stats.base import array_stats

from msrm.diagnostics import bfmi, block_statistics, summary

RNG = np.random.default_rng(20)


def chains_of_every_kind(n_chains: int, n_draws: int) -> np.ndarray:
    """(quantity, chain, draw): white, sticky, antithetic, tied, shifted, heavy-tailed, large-mean series."""
    white = RNG.standard_normal((12, n_chains, n_draws))
    walk = white.cumsum(axis=-1)
    ar = white.copy()
    for t in range(1, n_draws):
        ar[..., t] += 0.9 * ar[..., t - 1]
    anti = white.copy()
    for t in range(1, n_draws):
        anti[..., t] -= 0.6 * anti[..., t - 1]
    shift = white[3:5] + np.arange(n_chains)[:, None] * 0.3
    rounded = np.round(2 * white[5:7]) / 2
    repeated = np.repeat(white[7:8], 3, axis=-1)[..., :n_draws]
    heavy = white[8:9] / np.abs(white[9:10])
    return np.concatenate(
        [white[:2], walk[:2], ar[:2], anti[:2], shift, rounded, repeated, heavy, 1e6 + white[10:11], 1e-7 * white[11:]]
    )


@pytest.mark.parametrize("n_draws", [4, 5, 7, 50, 101, 400, 1000])
@pytest.mark.parametrize("n_chains", [2, 4])
def test_every_statistic_equals_arviz(n_chains, n_draws):
    x = chains_of_every_kind(n_chains, n_draws)
    ours = block_statistics(x)
    sound = ours["problem"] == 0
    x, ours = x[sound], {name: values[sound] for name, values in ours.items()}
    # ArviZ calls a series constant below a range of 1e-15; ours is free of units, hence scaled for the comparison.
    assert len(x) >= 10
    theirs = {
        "r_hat": array_stats.rhat(x),
        "ess_bulk": array_stats.ess(x, method="bulk"),
        "ess_tail": array_stats.ess(x, method="tail", prob=0.89),
        "mcse_mean": array_stats.mcse(x, method="mean"),
        "mcse_sd": array_stats.mcse(x, method="sd"),
        "mean": x.mean(axis=(1, 2)),
        "sd": x.std(axis=(1, 2), ddof=1),
        "median": np.median(x, axis=(1, 2)),
        "q5": np.quantile(x, 0.05, axis=(1, 2)),
        "q95": np.quantile(x, 0.95, axis=(1, 2)),
    }
    for name, values in theirs.items():
        # The moments of a quantity with mean 1e6 and sd 1 lose six digits in either order of summation.
        np.testing.assert_allclose(ours[name], values, rtol=1e-9 if name.startswith("mcse") else 1e-10, err_msg=name)


def test_defaults_are_those_of_arviz_on_named_arrays():
    x = xr.DataArray(RNG.standard_normal((4, 200, 3, 2)), dims=("chain", "draw", "a", "b"), name="w")
    table = summary(x).table
    assert list(table.quantity.values) == [f"w[{i}, {j}]" for i in range(3) for j in range(2)]
    data = x.to_dataset()
    for name, theirs in {
        "ess_bulk": azs_ess(data),
        "ess_tail": azs_ess(data, method="tail"),
        "r_hat": azs_rhat(data),
    }.items():
        np.testing.assert_allclose(table[name], theirs["w"].values.ravel(), rtol=1e-10)


@pytest.mark.parametrize("draws", [30, 2000])
def test_a_block_boundary_changes_nothing(draws):
    x = RNG.standard_normal((2, draws, 520)).cumsum(axis=1)
    whole = summary(x).table
    for columns in (slice(0, 10), slice(70, 80), slice(505, 515)):
        part = summary(x[..., columns], n_jobs=1).table
        np.testing.assert_array_equal(part.ess_bulk.values, whole.ess_bulk.values[columns])
        np.testing.assert_array_equal(part.r_hat.values, whole.r_hat.values[columns])


def test_values_closer_than_the_sort_keys_resolve_are_ranked_exactly():
    base = RNG.standard_normal((2, 64))
    near = np.nextafter(base, np.inf)
    x = np.concatenate([base, near, -base, -near], axis=1)[None]
    ours = block_statistics(x)
    np.testing.assert_allclose(ours["ess_bulk"], array_stats.ess(x, method="bulk"), rtol=1e-10)
    np.testing.assert_allclose(ours["r_hat"], array_stats.rhat(x), rtol=1e-10)


@pytest.mark.parametrize("n_draws", [38, 42, 128, 700])
@pytest.mark.parametrize("stickiness", [0.0, 0.9, 0.999])
def test_series_that_need_few_lags_many_or_all_equal_arviz(n_draws, stickiness):
    rng = np.random.default_rng(n_draws)
    x = rng.standard_normal((20, 2, n_draws))
    for t in range(1, n_draws):
        x[..., t] += stickiness * x[..., t - 1]
    ours = block_statistics(x)
    np.testing.assert_allclose(ours["ess_bulk"], array_stats.ess(x, method="bulk"), rtol=1e-10)
    np.testing.assert_allclose(ours["ess_tail"], array_stats.ess(x, method="tail", prob=0.89), rtol=1e-10)
    np.testing.assert_allclose(ours["r_hat"], array_stats.rhat(x), rtol=1e-10)


def test_distances_from_the_median_that_are_tied_or_nearly_so_are_ranked_exactly():
    base = RNG.standard_normal((3, 2, 50))
    mirrored = np.concatenate([base, -base], axis=2)  # every distance twice, once a side
    nearly = np.concatenate([base, -np.nextafter(base, np.inf)], axis=2)
    signed_zeros = np.concatenate([base[:, :, :40], np.zeros((3, 2, 5)), -np.zeros((3, 2, 5))], axis=2)
    middle = np.array(base)
    middle[:, 1, 20:22] = np.array([-1e-9, 1e-9]) + np.median(base)
    for x in (mirrored, nearly, signed_zeros, middle, 1e60 * base, 1e-60 * base):
        ours = block_statistics(x)
        np.testing.assert_allclose(ours["r_hat"], array_stats.rhat(x), rtol=1e-10)
        np.testing.assert_allclose(ours["ess_bulk"], array_stats.ess(x, method="bulk"), rtol=1e-10)


def good() -> np.ndarray:
    return RNG.standard_normal((4, 1000, 2))


def spoiled(kind: str) -> np.ndarray:
    x = good()
    if kind == "one constant chain":
        x[2, :, 0] = 0.0
    elif kind == "all constant, equal":
        x[..., 0] = 3.0
    elif kind == "all constant, different":
        x[..., 0] = np.arange(4.0)[:, None]
    elif kind == "constant up to rounding":
        x[..., 0] = 0.1 * (1 + 1e-16 * RNG.standard_normal((4, 1000)))
    elif kind == "stuck for half its length":
        x[1, 500:, 0] = x[1, 500, 0]
    elif kind == "one NaN":
        x[3, 17, 0] = np.nan
    elif kind == "a NaN chain":
        x[3, :, 0] = np.nan
    elif kind == "infinite":
        x[0, 0, 0] = np.inf
    return x


@pytest.mark.parametrize(
    ("kind", "problem", "words"),
    [
        ("one constant chain", "stuck", "never moved"),
        ("all constant, equal", "stuck", "never moved"),
        ("all constant, different", "stuck", "never moved"),
        ("constant up to rounding", "stuck", "never moved"),
        ("stuck for half its length", "stuck", "never moved"),
        ("one NaN", "not finite", "NaN or infinite"),
        ("a NaN chain", "not finite", "NaN or infinite"),
        ("infinite", "not finite", "NaN or infinite"),
    ],
)
def test_spoiled_chains_never_read_as_converged(kind, problem, words):
    result = summary(spoiled(kind))
    table = result.table
    assert not result.converged
    assert list(table.problem.values) == [problem, ""]
    # Reductions that skip NaN must not pass either.
    assert table.r_hat.max() == np.inf
    assert table.ess_bulk.min() == 0
    assert table.ess_tail.min() == 0
    assert result.verdict.startswith("NOT CONVERGED: 1 of 2 quantities.")
    assert words in result.verdict
    assert "x[0]" in result.verdict


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_fewer_than_four_draws_are_not_judged(draws):
    x = good()[:, :draws]
    assert np.isnan(array_stats.ess(np.moveaxis(x, 2, 0))).all()  # ArviZ answers NaN, which no comparison fails
    result = summary(x)
    assert not result.converged
    assert (result.table.problem == "too few draws").all()
    assert (result.table.r_hat == np.inf).all()
    assert (result.table.ess_bulk == 0).all()
    assert f"{draws} draws in each of 4 chains" in result.verdict
    assert np.isnan(bfmi(x[:, :1, 0])).all()


@pytest.mark.parametrize("shape", [(4, 0, 2), (0, 10, 2)])
def test_no_draws_are_an_error(shape):
    with pytest.raises(ValueError, match=f"no draws to summarize: {shape[0]} chains of {shape[1]} draws"):
        summary(np.zeros(shape))


def test_a_variable_without_elements_is_left_out():
    data = xr.Dataset(
        {"x": (("chain", "draw"), good()[..., 0]), "none": (("chain", "draw", "i"), np.zeros((4, 1000, 0)))}
    )
    assert list(summary(data).table.quantity.values) == ["x"]
    with pytest.raises(ValueError, match="no quantity to summarize"):
        summary(data[["none"]])


def test_one_chain_is_not_evidence():
    result = summary(good()[:1])
    assert not result.converged
    assert np.isnan(result.table.r_hat).all()
    assert (result.table.ess_bulk > 500).all()
    assert "at least 4 (chains=4)" in result.verdict


def test_good_chains_read_as_converged():
    result = summary(good())
    assert result.converged
    assert result.verdict.startswith("Converged: all 2 quantities")
    assert "x[1]" in str(result)


def test_the_verdict_says_what_to_do():
    x = good()
    x[0, :, 0] += 3
    x[..., 1] = np.cumsum(x[..., 1], axis=1)
    words = summary(x).verdict
    assert "Chains disagree on" in words
    assert "Warm up longer" in words
    assert "Draw about" in words


def test_sampler_statistics_are_read_from_a_tree():
    energy = RNG.standard_normal((4, 1000)).cumsum(axis=1) * 0.2
    posterior = xr.Dataset({"x": (("chain", "draw"), RNG.standard_normal((4, 1000)))})
    depth = np.full((4, 1000), 5)
    depth[:, :7] = 10
    stats = xr.Dataset(
        {
            "energy": (("chain", "draw"), energy),
            "diverging": (("chain", "draw"), depth == 10),
            "tree_depth": (("chain", "draw"), depth),
            "reached_max_tree_depth": (("chain", "draw"), depth == 10),
        }
    )
    result = summary(xr.DataTree.from_dict({"posterior": posterior, "sample_stats": stats}))
    assert not result.converged
    np.testing.assert_allclose(result.sampler["bfmi"], array_stats.bfmi(energy), rtol=1e-12)
    assert result.sampler["divergences"] == 28
    assert result.sampler["saturated_trees"] == 28
    assert result.sampler["max_tree_depth"] == 10
    assert "28 of 4000 transitions diverged" in result.verdict
    assert "28 of 4000 trees reached" in result.verdict
    assert "BFMI by chain" in result.verdict
    assert "NOT CONVERGED: see the sampler." in result.verdict


def test_bfmi_of_a_stuck_chain_is_nan():
    assert np.isnan(bfmi(np.zeros((1, 10)))).all()


def test_what_cannot_be_summarized_is_named():
    with pytest.raises(ValueError, match=r"\(chain, draw, \.\.\.\), found shape \(5,\)"):
        summary(np.zeros(5))
    with pytest.raises(ValueError, match="'w' has the dimensions"):
        summary(xr.Dataset({"w": ("draw", np.zeros(4))}))
    with pytest.raises(ValueError, match="no group 'posterior'"):
        summary(xr.DataTree.from_dict({"prior": xr.Dataset()}))
    with pytest.raises(ValueError, match="tail_prob"):
        summary(good(), tail_prob=0.05)
