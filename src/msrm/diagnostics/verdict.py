"""What the statistics mean, in plain words: which quantities have not converged and what to do about it."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

__all__ = ["Thresholds", "verdict"]


@dataclass(frozen=True)
class Thresholds:
    """When a quantity reads as converged: R-hat at most, ESS per chain at least, and BFMI at least."""

    r_hat: float = 1.01
    ess_per_chain: float = 100.0
    bfmi: float = 0.3


def verdict(table: xr.Dataset, sampler: dict[str, Any], thresholds: Thresholds) -> tuple[bool, str]:
    """Judge a table of quantities.

    Parameters
    ----------
    table : xarray.Dataset
        As in `Summary.table`, with `chains` and `draws` among its attributes.
    sampler : dict
        As in `Summary.sampler`.
    thresholds : Thresholds

    Returns
    -------
    converged : bool
    words : str
        One line that says whether, then one line for each finding with its remedy.
    """
    chains, draws = table.attrs["chains"], table.attrs["draws"]
    problem, r_hat = table.problem.values, table.r_hat.values
    ess = np.minimum(table.ess_bulk.values, table.ess_tail.values)
    needed = thresholds.ess_per_chain * chains
    sound = problem == ""
    # Written so that NaN fails.
    apart = sound & ~(r_hat <= thresholds.r_hat) & (chains > 1)
    slow = sound & ~(ess >= needed)
    bad = ~sound | apart | slow
    lines = [*_problem_lines(table, chains, draws)]
    if chains == 1:
        lines.append("One chain cannot show that chains agree. Run at least 4 (chains=4).")
    if apart.any():
        remedy = "Warm up longer; if it stays, chains sit in different modes: look at their traces and starts."
        lines.append(
            f"Chains disagree on {_named(table, apart, -r_hat)}: R-hat up to {r_hat[apart].max():.3f}, "
            f"wanted at most {thresholds.r_hat:g}. {remedy}"
        )
    if slow.any():
        factor = math.ceil(10 * needed / max(float(ess[slow].min()), 1e-9)) / 10
        advice = f"Draw about {factor:g} times as many." if factor < 100 else "More draws alone will not do."
        lines.append(
            f"Too few effective draws of {_named(table, slow, ess)}: {ess[slow].min():.0f}, wanted {needed:.0f} "
            f"({thresholds.ess_per_chain:g} a chain). {advice}"
        )
    lines += _sampler_lines(sampler, thresholds, chains * draws)
    converged = not lines
    if converged:
        with_r_hat = f"R-hat at most {r_hat.max():.4f}, " if chains > 1 else ""
        return True, f"Converged: all {len(r_hat)} quantities, {with_r_hat}at least {ess.min():.0f} effective draws."
    head = f"NOT CONVERGED: {bad.sum()} of {len(bad)} quantities." if bad.any() else "NOT CONVERGED: see the sampler."
    return False, "\n".join([head, *(f"- {line}" for line in lines)])


def _problem_lines(table: xr.Dataset, chains: int, draws: int) -> list[str]:
    remedies = {
        "too few draws": f"{draws} draws in each of {chains} chains: at least 4 are needed to judge, 1,000 are usual.",
        "not finite": "NaN or infinite draws of {}. Look at the data's units and the priors there; draws are unusable.",
        "stuck": "Some chain never moved, for half its length or more, in {}. "
        "Its proposals are all refused or the quantity is fixed: warm up longer, or look at its start.",
    }
    problem = table.problem.values
    found = ((name, remedy, problem == name) for name, remedy in remedies.items())
    return [remedy.format(_named(table, rows, np.arange(len(rows)))) for _, remedy, rows in found if rows.any()]


def _sampler_lines(sampler: dict[str, Any], thresholds: Thresholds, total: int) -> list[str]:
    lines = []
    energy = sampler.get("bfmi")
    if energy is not None and not (energy >= thresholds.bfmi).all():
        low = ", ".join(f"{value:.2f}" for value in energy)
        lines.append(
            f"BFMI by chain is {low}, wanted at least {thresholds.bfmi:g}: heavy tails; reparametrize or use Gibbs."
        )
    if sampler.get("divergences", 0):
        lines.append(
            f"{sampler['divergences']} of {total} transitions diverged: regions were missed. Raise target_accept "
            "(0.9, 0.95, 0.99), then shorten what remains by a tighter prior."
        )
    if sampler.get("saturated_trees", 0):
        lines.append(
            f"{sampler['saturated_trees']} of {total} trees reached the largest depth: steps are too short. "
            "Use a dense metric, warm up longer or raise max_tree_depth."
        )
    return lines


def _named(table: xr.Dataset, rows: np.ndarray, key: np.ndarray) -> str:
    """Up to three quantities of the marked rows, worst first by `key`, and how many more."""
    chosen = np.flatnonzero(rows)
    chosen = chosen[np.argsort(key[chosen], kind="stable")]
    names = ", ".join(str(name) for name in table.quantity.values[chosen[:3]])
    return names if len(chosen) <= 3 else f"{names} and {len(chosen) - 3} more"
