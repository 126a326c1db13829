"""Convergence statistics of many quantities at once: rank-normalized split R-hat, bulk and tail ESS, MCSE, BFMI.

The formulas are those of Vehtari, Gelman, Simpson, Carpenter and Buerkner (2021, arXiv 1903.08008) as ArviZ 1
computes them; only the evaluation differs. Every function works on a block (quantity, chain, draw): one sort
gives ranks, median, folded ranks and quantiles, and two chains share one complex FFT.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.fft import fft, irfft, next_fast_len
from scipy.special import ndtri

__all__ = ["MIN_DRAWS", "bfmi", "block_statistics", "problems"]

MIN_DRAWS = 4
# Most series leave Geyer's sequence within 160 lags; the others are transformed again at full length.
_SHORT_LAGS = 160
Array = NDArray[np.float64]


def problems(block: Array) -> NDArray[np.int8]:
    """What forbids reading a quantity: 0 nothing, 1 stuck in some half chain, 2 not finite, 3 too few draws.

    Parameters
    ----------
    block : (quantity, chain, draw)

    Returns
    -------
    (quantity,) of int8
        A half chain is stuck when its range is below 8 rounding errors of its largest magnitude.
    """
    if block.shape[2] < MIN_DRAWS:
        return np.full(block.shape[0], 3, np.int8)
    split = _split(block)
    low, high = split.min(axis=2), split.max(axis=2)
    finite = np.isfinite(low).all(axis=1) & np.isfinite(high).all(axis=1)
    with np.errstate(invalid="ignore"):
        flat = (high - low) <= 8 * np.finfo(float).eps * np.maximum(np.abs(low), np.abs(high))
    return np.where(finite, flat.any(axis=1).astype(np.int8), np.int8(2))


def block_statistics(block: Array, *, tail_prob: float = 0.89) -> dict[str, Array]:
    """Location, spread, Monte Carlo error and convergence of each quantity of one block.

    Parameters
    ----------
    block : (quantity, chain, draw)
    tail_prob : float
        Tail ESS is the smaller of those of the quantiles `tail_prob` and ``1 - tail_prob`` (ArviZ's default).

    Returns
    -------
    dict of (quantity,)
        mean, sd, q5, median, q95, mcse_mean, mcse_sd, ess_bulk, ess_tail, r_hat, and `problem` (see `problems`).
        A quantity with a problem has R-hat infinity and ESS 0, so that no comparison reads it as converged;
        R-hat of a single chain is NaN, as in ArviZ.
    """
    problem = problems(block)
    good = problem == 0
    finite = problem < 2
    out = {name: np.full(len(block), np.nan) for name in ("mean", "sd", "q5", "median", "q95", "mcse_mean", "mcse_sd")}
    out |= {"ess_bulk": np.zeros(len(block)), "ess_tail": np.zeros(len(block)), "r_hat": np.full(len(block), np.inf)}
    if good.any():
        for name, values in _convergence(block if good.all() else block[good], tail_prob).items():
            out[name][good] = values
    elif block.shape[1] == 1:
        out["r_hat"][good] = np.nan
    stuck = finite & ~good
    if stuck.any():
        rows = block[stuck].reshape(stuck.sum(), -1)
        out["mean"][stuck], out["sd"][stuck] = rows.mean(axis=1), rows.std(axis=1, ddof=1)
        out["q5"][stuck], out["median"][stuck], out["q95"][stuck] = np.quantile(rows, [0.05, 0.5, 0.95], axis=1)
    return out | {"problem": problem}


def bfmi(energy: Array) -> Array:
    """Bayesian fraction of missing information of each chain (Betancourt 2016); below 0.3 is poor.

    Parameters
    ----------
    energy : (chain, draw)

    Returns
    -------
    (chain,)
        NaN where a chain's energy is constant or not finite.
    """
    energy = np.atleast_2d(np.asarray(energy, dtype=float))
    with np.errstate(invalid="ignore", divide="ignore"):
        value = np.square(np.diff(energy, axis=1)).mean(axis=1) / energy.var(axis=1, ddof=1)
    return np.where(np.isfinite(value), value, np.nan)


def _convergence(block: Array, tail_prob: float) -> dict[str, Array]:
    """All statistics of a block without problems."""
    n_quantities, n_chains, n_draws = block.shape
    flat = block.reshape(n_quantities, -1)
    split = _split(block)
    pooled = split.reshape(n_quantities, -1)
    order = _argsort(pooled)
    ordered = np.take(pooled, order)
    whole = ordered if n_draws % 2 == 0 else np.sort(flat, axis=1)
    low, high = sorted((tail_prob, 1 - tail_prob))
    scores = _normal_scores(ordered, order).reshape(split.shape)
    mean = flat.mean(axis=1)
    centred = flat - mean[:, None]
    square = np.square(centred)
    variance = square.sum(axis=1) / (flat.shape[1] - 1)
    ess_mean = _ess(_split(centred.reshape(block.shape)))
    ess_square = _ess(_split(square.reshape(block.shape)))
    mean_square = square.mean(axis=1)
    fourth = np.square(square).mean(axis=1)
    ess_tail = [_ess(_split((flat <= _quantile(whole, p)[:, None]).reshape(block.shape))) for p in (low, high)]
    out = {
        "mean": mean,
        "sd": np.sqrt(variance),
        "q5": _quantile(whole, 0.05),
        "median": _quantile(whole, 0.5),
        "q95": _quantile(whole, 0.95),
        "mcse_mean": np.sqrt(variance / ess_mean),
        "mcse_sd": np.sqrt((fourth - mean_square**2) / ess_square / mean_square / 4),
        "ess_bulk": _ess(scores),
        "ess_tail": np.minimum(*ess_tail),
        "r_hat": np.full(n_quantities, np.nan),
    }
    if n_chains > 1:
        out["r_hat"] = np.maximum(_r_hat(scores), _r_hat(_folded_scores(ordered, order).reshape(split.shape)))
    return out


def _split(block: NDArray) -> NDArray:
    """(quantity, 2 chain, draw // 2): halves of every chain; an odd middle draw is dropped."""
    n_quantities, n_chains, n_draws = block.shape
    half = n_draws // 2
    if n_draws % 2 == 0:
        return block.reshape(n_quantities, 2 * n_chains, half)
    return np.concatenate((block[:, :, :half], block[:, :, -half:]), axis=1)


def _argsort(values: Array) -> NDArray[np.int64]:
    """Flat positions (into the raveled array) that sort each row; ties in any order.

    The order-preserving integer image of a double is sorted with its column in the lowest bits, which costs
    half of an argsort. Rows where those bits decided between different values are sorted again.
    """
    n_rows, n_columns = values.shape
    bits = int(n_columns - 1).bit_length()
    keys = (values + 0.0).view(np.int64)  # -0.0 becomes 0.0
    keys ^= (keys >> 63) & np.int64(0x7FFFFFFFFFFFFFFF)
    keys &= ~np.int64((1 << bits) - 1)
    keys |= np.arange(n_columns)
    keys.sort(axis=1)
    keys &= np.int64((1 << bits) - 1)
    keys += n_columns * np.arange(n_rows)[:, None]
    ordered = np.take(values, keys)
    for row in np.flatnonzero((ordered[:, 1:] < ordered[:, :-1]).any(axis=1)):
        keys[row] = np.argsort(values[row]) + n_columns * row
    return keys


def _normal_scores(ordered: Array, order: NDArray[np.int64]) -> Array:
    """Normal quantiles of Blom's fractional ranks, ties sharing their average rank.

    Parameters
    ----------
    ordered : (quantity, sample), sorted rows
    order : (quantity, sample), flat positions the sorted values came from, where their scores are put
    """
    n = ordered.shape[1]
    table = ndtri((np.arange(2 * n - 1) / 2 + 1 - 3 / 8) / (n + 1 / 4))
    scores = np.empty(ordered.size)
    scores[order] = table[::2].copy()
    tied = ordered[:, 1:] == ordered[:, :-1]
    rows, first = np.nonzero(tied)
    # A pair at i and i + 1 has twice its average rank at 2 i + 1; longer runs are found by accumulation.
    scores[order[rows, first]] = scores[order[rows, first + 1]] = table[2 * first + 1]
    long = np.unique(rows[1:][(rows[1:] == rows[:-1]) & (first[1:] == first[:-1] + 1)])
    if long.size:
        column = np.arange(n)
        start, end = np.tile(column, (2, long.size, 1))
        start[:, 1:][tied[long]] = 0
        end[:, :-1][tied[long]] = n - 1
        start = np.maximum.accumulate(start, axis=1)
        end = np.minimum.accumulate(end[:, ::-1], axis=1)[:, ::-1]
        scores[order[long]] = table[start + end]
    return scores.reshape(ordered.shape)


def _folded_scores(ordered: Array, order: NDArray[np.int64]) -> Array:
    """Normal scores of the distance from the median, from rows already sorted by value."""
    distance = np.abs(ordered - _quantile(ordered, 0.5)[:, None])
    # Falling then rising: a stable merge sort sees two runs and is linear.
    fold = np.argsort(distance, axis=1, kind="stable")
    fold += distance.shape[1] * np.arange(len(distance))[:, None]
    return _normal_scores(np.take(distance, fold), np.take(order, fold))


def _quantile(ordered: Array, p: float) -> Array:
    """Linear-interpolation quantile of sorted rows, rounded as `numpy.quantile` and `numpy.median` round."""
    position = p * (ordered.shape[1] - 1)
    below = int(np.floor(position))
    gamma = position - below
    a, b = ordered[:, below], ordered[:, min(below + 1, ordered.shape[1] - 1)]
    if p == 0.5:
        return a if gamma == 0 else (a + b) / 2
    return a + (b - a) * gamma if gamma < 0.5 else b - (b - a) * (1 - gamma)


def _r_hat(chains: Array) -> Array:
    """Potential scale reduction of (quantity, chain, draw)."""
    n = chains.shape[2]
    within = chains.var(axis=2, ddof=1).mean(axis=1)
    between = n * chains.mean(axis=2).var(axis=1, ddof=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt((between / within + n - 1) / n)


def _ess(chains: NDArray, short: bool = True) -> Array:
    """Effective sample size by Geyer's initial monotone sequence; chains even in number.

    Parameters
    ----------
    chains : (quantity, chain, draw)
    short : bool
        Try `_SHORT_LAGS` lags first; series that need more are done again at full length.

    Returns
    -------
    (quantity,)
        All draws for a constant quantity, as ArviZ.
    """
    n_quantities, n_chains, n = chains.shape
    lags = min(n, _SHORT_LAGS) if short else n
    means = chains.mean(axis=2)
    acov = _mean_autocovariance(chains, means, lags)
    mean_var = acov[:, 0] * n / (n - 1)
    var_plus = acov[:, 0] + means.var(axis=1, ddof=1)
    constant = var_plus <= 0
    with np.errstate(invalid="ignore", divide="ignore"):
        rho = 1.0 - (mean_var[:, None] - acov) / var_plus[:, None]
    rho[:, 0] = 1.0
    rho[constant] = 0.0
    last_pair = max((n - 3) // 2, 0)
    n_pairs = min(lags // 2, last_pair + 1)
    pairs = rho[:, 0 : 2 * n_pairs : 2] + rho[:, 1 : 2 * n_pairs : 2]
    ended = pairs <= 0
    found = ended.any(axis=1)
    stop = np.where(found, ended.argmax(axis=1), n_pairs - 1)
    rows = np.arange(n_quantities)
    even = rho[rows, 2 * stop]
    even = np.where((even > 0) | (pairs[rows, stop] >= 0), even, 0.0)
    monotone = np.minimum.accumulate(pairs, axis=1)
    monotone[np.arange(n_pairs) >= stop[:, None]] = 0.0
    size = n_chains * n
    tau = np.maximum(-1.0 + 2.0 * monotone.sum(axis=1) + even, 1 / np.log10(size))
    ess = np.where(constant, size, size / tau)
    again = ~found & ~constant
    if n_pairs <= last_pair and again.any():
        ess[again] = _ess(chains[again], short=False)
    return ess


def _mean_autocovariance(chains: NDArray, means: Array, lags: int) -> Array:
    """Autocovariance (divided by the draws) averaged over chains, (quantity, lags); two chains per complex FFT."""
    n_quantities, n_chains, n = chains.shape
    size = next_fast_len(n + lags)
    half = n_chains // 2
    packed = np.empty((n_quantities, half, size), np.complex128)
    packed[:, :, n:] = 0.0
    np.subtract(chains[:, :half], means[:, :half, None], out=packed.real[:, :, :n])
    np.subtract(chains[:, half:], means[:, half:, None], out=packed.imag[:, :, :n])
    spectrum = fft(packed, axis=2, overwrite_x=True).view(np.float64)
    np.square(spectrum, out=spectrum)
    power = spectrum.sum(axis=1)
    power = power[:, ::2] + power[:, 1::2]
    # |F(x + i y)|^2 at k and -k averages to |F(x)|^2 + |F(y)|^2.
    folded = (power[:, : size // 2 + 1] + power[:, -np.arange(size // 2 + 1)]) / 2
    return irfft(folded, size, axis=1)[:, :lags] / (n * n_chains)
