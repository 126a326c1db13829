"""Convergence statistics of many quantities at once: rank-normalized split R-hat, bulk and tail ESS, MCSE, BFMI.

The formulas are those of Vehtari, Gelman, Simpson, Carpenter and Buerkner (2021, arXiv 1903.08008) as ArviZ 1
computes them; only the evaluation differs. Every function works on a block (quantity, chain, draw): one sort gives
ranks, median and quantiles, another the half chains of the folded ranks, which is all that R-hat needs of them.
Autocovariances are products of a series with itself shifted until Geyer's sequence ends; few series need an FFT.
"""

from functools import lru_cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.fft import fft, irfft, next_fast_len
from scipy.special import ndtri

__all__ = ["MIN_DRAWS", "bfmi", "block_statistics", "problems"]

MIN_DRAWS = 4
# Most series leave Geyer's sequence within the first lags; the others are transformed, most of these within the second.
_FIRST_LAGS, _SECOND_LAGS = 20, 160
_TRANSFORMED = 24  # series at a time: they stay in a core's cache
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
        NaN where a chain's energy is constant or not finite, or there are fewer than two draws.
    """
    energy = np.atleast_2d(np.asarray(energy, dtype=float))
    if energy.shape[1] < 2:
        return np.full(len(energy), np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = np.square(np.diff(energy, axis=1)).mean(axis=1) / energy.var(axis=1, ddof=1)
    return np.where(np.isfinite(value), value, np.nan)


def _convergence(block: Array, tail_prob: float) -> dict[str, Array]:
    """All statistics of a block without problems."""
    n_quantities, n_chains, n_draws = block.shape
    flat = block.reshape(n_quantities, -1)
    split = _split(block)
    pooled = split.reshape(n_quantities, -1)
    order, close = _argsort(pooled)
    every, places = (pooled, order) if n_draws % 2 == 0 else (np.sort(flat, axis=1), None)
    low, high = sorted((tail_prob, 1 - tail_prob))
    scores = _normal_scores(pooled, order, close)
    mean = flat.mean(axis=1)
    centred = flat - mean[:, None]
    square = np.square(centred)
    mean_square = square.mean(axis=1)
    variance = mean_square * (flat.shape[1] / (flat.shape[1] - 1))
    fourth = np.vecdot(square, square) / flat.shape[1]
    halves = [_split(values.reshape(block.shape)) for values in (centred, square)]
    below = [_split((flat <= _quantile(every, places, p)[:, None]).reshape(block.shape)) for p in (low, high)]
    ess_bulk, ess_mean, ess_square, *ess_tail = _ess(scores.reshape(split.shape), *halves, *below)
    out = {
        "mean": mean,
        "sd": np.sqrt(variance),
        "q5": _quantile(every, places, 0.05),
        "median": _quantile(every, places, 0.5),
        "q95": _quantile(every, places, 0.95),
        "mcse_mean": np.sqrt(variance / ess_mean),
        "mcse_sd": np.sqrt((fourth - mean_square**2) / ess_square / mean_square / 4),
        "ess_bulk": ess_bulk,
        "ess_tail": np.minimum(*ess_tail),
        "r_hat": np.full(n_quantities, np.nan),
    }
    if n_chains > 1:
        means = scores.reshape(split.shape).mean(axis=2)
        bulk = _r_hat(means, np.vecdot(scores, scores), split.shape[2])
        out["r_hat"] = np.maximum(bulk, _folded_r_hat(split, order))
    return out


def _split(block: NDArray) -> NDArray:
    """(quantity, 2 chain, draw // 2): halves of every chain; an odd middle draw is dropped."""
    n_quantities, n_chains, n_draws = block.shape
    half = n_draws // 2
    if n_draws % 2 == 0:
        return block.reshape(n_quantities, 2 * n_chains, half)
    return np.concatenate((block[:, :, :half], block[:, :, -half:]), axis=1)


def _argsort(values: Array) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Positions that sort each row (ties in any order), and the rows where two values are close; others have no tie.

    Doubles are sorted with their column in the lowest bits, which costs half of an argsort. Close are neighbours that
    those bits may have decided between; such rows are sorted again by their values.
    """
    bits = int(values.shape[1] - 1).bit_length()
    column = np.uint64((1 << bits) - 1)
    keys = (values + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    keys &= ~column
    keys |= np.arange(values.shape[1], dtype=np.uint64)
    keys.view(np.float64).sort(axis=1)
    close = np.flatnonzero(((keys[:, 1:] ^ keys[:, :-1]) <= column).any(axis=1))
    keys &= column
    order = keys.view(np.int64)
    for row in close:
        order[row] = np.argsort(values[row])
    return order, close


@lru_cache(maxsize=8)
def _score_table(n: int) -> Array:
    """Normal quantiles of Blom's fractional ranks 1, 1.5, 2, ... n of n values, (2 n - 1,)."""
    table = ndtri((np.arange(2 * n - 1) / 2 + 1 - 3 / 8) / (n + 1 / 4))
    table.flags.writeable = False
    return table


def _normal_scores(values: Array, order: NDArray[np.int64], close: NDArray[np.intp]) -> Array:
    """Normal quantiles of Blom's fractional ranks, ties sharing their average rank.

    Parameters
    ----------
    values : (quantity, sample)
    order : (quantity, sample)
        Positions that sort them.
    close : (row,)
        Rows that may have ties.
    """
    table = _score_table(values.shape[1])
    scores, distinct = np.empty(values.shape), np.ascontiguousarray(table[::2])
    for own, place in zip(scores, order, strict=True):
        own[place] = distinct
    for row in close:
        ordered = values[row, order[row]]
        changes = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        first, after = np.append(0, changes), np.append(changes, len(ordered))
        # Ranks first + 1 to after have twice their average at first + after - 1 of the table.
        scores[row, order[row]] = np.repeat(table[first + after - 1], after - first)
    return scores


def _folded_r_hat(split: Array, order: NDArray[np.int64]) -> Array:
    """R-hat of the normal scores of distances from the median, of which only each half chain's sum is needed.

    Distances are sorted with the number of their half chain in the lowest bits. The two middle values are the nearest
    and often tied; rows where those bits decide between others, or between these untied, are done value by value.

    Parameters
    ----------
    split : (quantity, chain, draw)
        Half chains.
    order : (quantity, sample)
        Positions that sort them, pooled.
    """
    n_chains, n = split.shape[1:]
    pooled = split.reshape(len(split), -1)
    number = np.int64((1 << int(n_chains - 1).bit_length()) - 1)
    median = _quantile(pooled, order, 0.5)[:, None]
    distance = np.abs(pooled - median)
    keys = distance.view(np.int64) & ~number
    keys |= np.repeat(np.arange(n_chains), n)
    keys.sort(axis=1)
    close = (keys[:, 1:] ^ keys[:, :-1]) <= number
    middle = order[:, order.shape[1] // 2 - 1 : order.shape[1] // 2 + 1]
    inner = np.take_along_axis(distance, middle, axis=1)
    tied = inner[:, 0] == inner[:, 1]
    exact = np.flatnonzero(close[:, 1:].any(axis=1) | (close[:, 0] & ~tied))
    keys &= number
    table = _score_table(pooled.shape[1])
    distinct = np.ascontiguousarray(table[::2])
    sums = np.array([np.bincount(row, distinct, n_chains) for row in keys])
    squares = distinct @ distinct + tied * (2 * table[1] ** 2 - table[0] ** 2 - table[2] ** 2)
    for place, score in enumerate(table[:3:2]):
        sums[np.flatnonzero(tied), keys[tied, place]] += table[1] - score
    if len(exact):
        scores = _normal_scores(distance[exact], np.argsort(distance[exact], axis=1), np.arange(len(exact)))
        sums[exact] = scores.reshape(len(exact), n_chains, n).sum(axis=2)
        squares[exact] = np.vecdot(scores, scores)
    return _r_hat(sums / n, squares, n)


def _quantile(values: Array, order: NDArray[np.int64] | None, p: float) -> Array:
    """Linear-interpolation quantile of rows, rounded as `numpy.quantile` and `numpy.median` round.

    Parameters
    ----------
    values : (quantity, sample)
    order : (quantity, sample), optional
        Positions that sort them; None for sorted values.
    p : float
    """
    position = p * (values.shape[1] - 1)
    below = int(np.floor(position))
    gamma, rows = position - below, np.arange(len(values))
    a, b = (
        values[rows, place if order is None else order[:, place]]
        for place in (below, min(below + 1, values.shape[1] - 1))
    )
    if p == 0.5:
        return a if gamma == 0 else (a + b) / 2
    return a + (b - a) * gamma if gamma < 0.5 else b - (b - a) * (1 - gamma)


def _r_hat(means: Array, squares: Array, n: int) -> Array:
    """Potential scale reduction from the means of chains of n draws (quantity, chain) and their sums of squares."""
    n_chains = means.shape[1]
    within = (squares - n * np.vecdot(means, means)) / (n_chains * (n - 1))
    between = n * means.var(axis=1, ddof=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt((between / within + n - 1) / n)


def _ess(*series: NDArray) -> Array:
    """Effective sample sizes by Geyer's initial monotone sequence; chains even in number.

    Parameters
    ----------
    *series : (quantity, chain, draw)
        Numbers, or whether something is true.

    Returns
    -------
    (series, quantity)
        All draws for a constant quantity, as ArviZ.
    """
    n_quantities, n_chains, n = series[0].shape
    looked = [_indicator_products(one) if one.dtype == bool else _products(one) for one in series]
    means, acov = (np.concatenate(parts) for parts in zip(*looked, strict=True))
    between = means.var(axis=1, ddof=1)
    ess, ended = _geyer(acov, between, n_chains, n)
    rows = np.flatnonzero(~ended)
    for lags in (min(n, _SECOND_LAGS), n):
        if not len(rows):
            break
        acov = np.empty((len(rows), lags))
        for start in range(0, len(rows), _TRANSFORMED):
            part = rows[start : start + _TRANSFORMED]
            chains = np.stack([series[row // n_quantities][row % n_quantities] for row in part])
            acov[start : start + _TRANSFORMED] = _mean_autocovariance(chains, means[part], lags)
        ess[rows], ended = _geyer(acov, between[rows], n_chains, n)
        rows = rows[~ended]
    return ess.reshape(len(series), n_quantities)


def _products(chains: Array) -> tuple[Array, Array]:
    """Means of chains, and their mean autocovariance at the first lags as products of the series with itself."""
    n_quantities, n_chains, n = chains.shape
    lags, means = min(n, _FIRST_LAGS), chains.mean(axis=2)
    # Zeros after every chain, so that one product over all of them stays within each.
    padded = np.zeros((n_quantities, n_chains * (n + lags) + lags))
    centred = padded[:, :-lags].reshape(n_quantities, n_chains, -1)[:, :, :n]
    np.subtract(chains, means[:, :, None], out=centred)
    shifted = sliding_window_view(padded, padded.shape[1] - lags, axis=1)
    return means, np.vecdot(shifted[:, :1], shifted[:, :lags]) / (n * n_chains)


def _indicator_products(chains: NDArray[np.bool_]) -> tuple[Array, Array]:
    """As :func:`_products`, of zeros and ones: pairs of ones are counted 64 at a time, then centred."""
    n_quantities, n_chains, n = chains.shape
    lags = min(n, _FIRST_LAGS)
    words = -(-(n + lags) // 64)
    padded = np.zeros((n_quantities, n_chains, 64 * words), np.bool_)
    padded[:, :, :n] = chains
    bits = np.zeros((n_quantities, 1, n_chains * words + 1), np.uint64)
    bits[:, 0, :-1] = np.packbits(padded, axis=2, bitorder="little").view("<u8").reshape(n_quantities, -1)
    lag = np.arange(lags, dtype=np.uint64)[:, None]
    # Bits of the following word move in from above; by 64 for lag 0, which takes two steps.
    shifted = bits[..., :-1] >> lag | (bits[..., 1:] << np.uint64(1)) << (np.uint64(63) - lag)
    shifted &= bits[..., :-1]
    pairs = np.bitwise_count(shifted).sum(axis=2, dtype=np.int64)
    means = np.bitwise_count(bits[:, 0, :-1]).reshape(n_quantities, n_chains, words).sum(axis=2) / n
    ends = np.zeros((n_quantities, n_chains, lags))
    np.cumsum(chains[:, :, : lags - 1] + chains[:, :, :-lags:-1].astype(float), axis=2, out=ends[:, :, 1:])
    square = np.vecdot(means, means)[:, None]
    centring = np.einsum("qcl,qc->ql", ends, means) - (n + np.arange(lags)) * square
    return means, (pairs + centring) / (n * n_chains)


def _geyer(acov: Array, between: Array, n_chains: int, n: int) -> tuple[Array, NDArray[np.bool_]]:
    """Effective sample size from the first lags of the mean autocovariance, and whether the sequence ended there.

    Parameters
    ----------
    acov : (quantity, lag)
    between : (quantity,)
        Variance of the chains' means.
    n_chains, n : int
        Chains, and draws of each.
    """
    lags, size = acov.shape[1], n_chains * n
    mean_var = acov[:, 0] * n / (n - 1)
    var_plus = acov[:, 0] + between
    constant = var_plus <= 0
    with np.errstate(invalid="ignore", divide="ignore"):
        rho = 1.0 - (mean_var[:, None] - acov) / var_plus[:, None]
    rho[:, 0] = 1.0
    rho[constant] = 0.0
    last_pair = max((n - 3) // 2, 0)
    n_pairs = min(lags // 2, last_pair + 1)
    pairs = rho[:, 0 : 2 * n_pairs : 2] + rho[:, 1 : 2 * n_pairs : 2]
    below = pairs <= 0
    found = below.any(axis=1)
    stop = np.where(found, below.argmax(axis=1), n_pairs - 1)
    rows = np.arange(len(acov))
    even = rho[rows, 2 * stop]
    even = np.where((even > 0) | (pairs[rows, stop] >= 0), even, 0.0)
    monotone = np.minimum.accumulate(pairs, axis=1)
    monotone[np.arange(n_pairs) >= stop[:, None]] = 0.0
    tau = np.maximum(-1.0 + 2.0 * monotone.sum(axis=1) + even, 1 / np.log10(size))
    return np.where(constant, size, size / tau), found | constant | (n_pairs > last_pair)


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
    power[:, 1:] += power[:, :0:-1].copy()
    power[:, 1:] /= 2
    return irfft(power[:, : size // 2 + 1], size, axis=1)[:, :lags] / (n * n_chains)
