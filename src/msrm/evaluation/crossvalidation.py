"""Penalties, and what else is asked, chosen by cross-validated prediction inside the training recording (DESIGN 5).

R-MSRM's objective stays the same when loadings grow by a factor, latents shrink by it and their penalties are rescaled,
so only two combinations of the three strengths matter:

    strength = sqrt(loading_ridge latent_ridge)   and   timescale = sqrt(roughness / latent_ridge)  (seconds).

The default search is over these two, for every combination of the other candidates: from heavy shrinkage towards light
(heavily shrunken fits are quick) in half, then quarter decades, until nothing near is better. A candidate's score is
the mean over target streams of R^2 pooled over folds. Strengths are those of "feature" scaling, which mean the same
for a stream of 20 features and of 20,000; "pair" scaling divides the loading ridge by the mean number of features.

A ridge that is right for a fold is too strong for the whole: the objective is a mean over runs, so what the prior on
loadings weighs against it shrinks as runs are added (latents belong to their run, their penalties stay). The loading
ridge that the search found is therefore multiplied by the share of the data that a fold trains on.
"""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from msrm.evaluation.answers import FIT
from msrm.evaluation.holdout import Fold, checked_targets, make_folds
from msrm.evaluation.question import SOURCES, Pair, Questions
from msrm.evaluation.report import fold_tally
from msrm.recording import Recording
from msrm.runtime.workers import Workers

STRENGTHS = ("loading_ridge", "latent_ridge", "roughness")
OPTIONS = ("targets", "source", "hold_out", "folds")
START_STRENGTHS = (3e-2, 3e-1)  # with unit variances, factors vanish near 1
START_TIMESCALES = (3.0, 30.0)  # latent steps
# Within a quarter decade the score of recordings seen so far is flat within its noise; half a decade can hide the best.
FACTORS = (10.0**0.5, 10.0**0.25)
ROUNDS = 8
# A candidate's fit may stop earlier than the final one: on a real recording its R^2 moved by less than 0.002.
CANDIDATE_TOL = 1e-6
Settings = dict[str, Any]
Errors = dict[Pair, tuple[float, float]]


def select_penalties(
    estimator: Any, recording: Recording, *, n_jobs: int | None = None, progress: bool | None = None
) -> tuple[Settings, xr.Dataset]:
    """Choose the settings that predict held-out parts of a recording best.

    Parameters
    ----------
    estimator : estimator
        Its ``penalties`` is ``"cv"``, or a dict from constructor argument to candidate values. Every combination of
        named candidates is tried; when none of the three strengths is named, they are searched as well. Four more
        keys say how: ``"targets"`` (as in :func:`msrm.evaluate`: by default each stream in turn), ``"source"``,
        ``"hold_out"`` (``"runs"``, or ``"blocks"`` where there is one run) and ``"folds"``.
    recording : Recording
        Training data; nothing else is looked at.
    n_jobs : int, optional
        Processes; the estimator's by default. Any number gives the same choice.
    progress : bool, optional
        A progress bar: on a terminal only by default.

    Returns
    -------
    settings : dict
        Constructor arguments of the best candidate, a searched loading ridge corrected for the size of the folds.
    results : Dataset
        By ``candidate``: its settings, ``r2`` (mean over streams of R^2 pooled over folds), ``r2_by_fold`` and
        ``r2_by_stream``; ``attrs["best"]`` is the chosen candidate's position.

    Raises
    ------
    ValueError
        For names that are no constructor arguments, candidates that are no list, or a recording that cannot be split.
    """
    params = estimator.get_params(deep=False)
    named, options = _asked(params)
    targets = checked_targets(recording, options.get("targets"))
    source = options.get("source", "both")
    if source not in SOURCES:
        raise ValueError(f"penalties['source'] must be one of {', '.join(map(repr, SOURCES))}, found {source!r}.")
    hold_out = options.get("hold_out", "runs" if len(recording.runs) > 1 else "blocks")
    folds = make_folds(recording, hold_out, folds=options.get("folds"), targets=targets, seed=params.get("seed", 0))
    workers = params["n_jobs"] if n_jobs is None else n_jobs
    shared = (estimator, recording, targets, source)
    grid = [dict(zip(named, values, strict=True)) for values in product(*named.values())]
    with Workers(candidate_errors, n_jobs=workers, shared=shared) as pool:
        # A timescale below a step of the latent grid smooths nothing.
        search = _Search(pool, folds, params["latent_step"], progress)
        if any(name in named for name in STRENGTHS):
            search.score(grid)
            return search.best(), search.results()
        for rest in grid:
            search.score([rest | start for start in _starts(recording, params | rest)])
            for factor in FACTORS:
                search.walk(factor, search.best(rest))
    best = search.best()
    return best | {"loading_ridge": best["loading_ridge"] * _share(recording, folds)}, search.results()


class _Search:
    """Candidates tried so far and their errors on every fold."""

    def __init__(self, pool: Workers, folds: list[Fold], shortest: float, progress: bool | None) -> None:
        self._pool, self._folds, self._shortest, self._progress = pool, folds, shortest, progress
        self._tried: list[Settings] = []
        self._errors: list[list[Errors]] = []

    def score(self, candidates: Iterable[Settings]) -> None:
        """Try the candidates that were not tried before."""
        new = [settings for settings in candidates if not any(_same(settings, old) for old in self._tried)]
        jobs = [(settings, fold) for settings in new for fold in self._folds]
        found = self._pool.map(jobs, desc="penalties", progress=self._progress)
        self._tried += new
        n = len(self._folds)
        self._errors += [found[at * n : (at + 1) * n] for at in range(len(new))]
        if not any(self._errors[0]):
            raise ValueError(
                "No stream could be predicted from another: choose other penalties['targets'] or ['source']."
            )

    def walk(self, factor: float, best: Settings) -> None:
        """From a candidate move strength and timescale by a factor until all neighbours are worse."""
        rest = {name: value for name, value in best.items() if name not in STRENGTHS}
        for _ in range(ROUNDS):
            steps = product((1.0 / factor, 1.0, factor), repeat=2)
            near = [best | _scaled(best, strength, timescale) for strength, timescale in steps]
            self.score([settings for settings in near if _timescale(settings) >= self._shortest])
            before, best = best, self.best(rest)
            if best is before:
                return

    def best(self, rest: Settings | None = None) -> Settings:
        """The settings with the largest score, among those with the given ones; of equals the least shrunken."""
        r2 = self._r2()[0]
        among = [at for at, settings in enumerate(self._tried) if _same(rest or {}, settings) and np.isfinite(r2[at])]
        return self._tried[max(among, key=lambda at: (r2[at], -self._tried[at].get("latent_ridge", 0.0)))]

    def _r2(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Pair]]:
        """Scores (candidate,), by fold (candidate, fold) and by stream (candidate, stream), and the streams."""
        pairs = list(dict.fromkeys(pair for errors in self._errors[0] for pair in errors))
        shape = (len(self._tried), len(self._folds), len(pairs))
        sse, sst = np.zeros((2, *shape))
        for candidate, fold, column in np.ndindex(shape):
            sse[candidate, fold, column], sst[candidate, fold, column] = self._errors[candidate][fold].get(
                pairs[column], (0.0, 0.0)
            )
        by_fold, by_stream = _ratio(sse, sst), _ratio(sse.sum(axis=1), sst.sum(axis=1))
        return _mean(by_stream), _mean(by_fold), by_stream, pairs

    def results(self) -> xr.Dataset:
        """All candidates with their scores."""
        r2, by_fold, by_stream, pairs = self._r2()
        columns = {name: ("candidate", _column([s[name] for s in self._tried])) for name in self._tried[0]}
        scores = {
            "r2": ("candidate", r2),
            "r2_by_fold": (("candidate", "fold"), by_fold),
            "r2_by_stream": (("candidate", "stream"), by_stream),
        }
        coords = {"fold": [fold.name for fold in self._folds], "stream": [f"{p}/{m}" for p, m in pairs]}
        return xr.Dataset(columns | scores, coords, {"best": self._tried.index(self.best())})


def candidate_errors(
    estimator: Any, recording: Recording, targets: Questions | None, source: str, settings: Settings, fold: Fold
) -> Errors:
    """Squared error and squared distance from the training mean of each target stream in one fold."""
    params = estimator.get_params(deep=False)
    fixed = {"penalties": "given", "n_jobs": 1, "tol": max(params["tol"], CANDIDATE_TOL), "progress": False} | settings
    tally = fold_tally(estimator, recording, targets, source, (), fold, null=False, settings=fixed)
    errors: Errors = {}
    for piece in tally.pieces:
        sse, sst = errors.get(piece.pair, (0.0, 0.0))
        errors[piece.pair] = (sse + float(piece.sums[FIT].sse[0]), sst + float(piece.sums[FIT].sst[0]))
    return errors


def _asked(params: Mapping[str, Any]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Candidates and options in an estimator's ``penalties``."""
    penalties = params["penalties"]
    if penalties == "cv":
        return {}, {}
    if not isinstance(penalties, Mapping):
        raise ValueError(f"penalties must be 'given', 'cv' or a dict of candidates, found {penalties!r}.")
    named = {name: values for name, values in penalties.items() if name not in OPTIONS}
    for name, values in named.items():
        if name not in params or name == "penalties":
            raise ValueError(
                f"penalties[{name!r}] is neither a constructor argument nor one of {', '.join(OPTIONS)}; "
                f"arguments are {', '.join(params)}."
            )
        if not isinstance(values, list | tuple | np.ndarray) or not len(values):
            raise ValueError(f"penalties[{name!r}] must be a list of candidates, found {values!r}.")
    return {name: list(values) for name, values in named.items()}, {n: v for n, v in penalties.items() if n in OPTIONS}


def _starts(recording: Recording, params: Mapping[str, Any]) -> list[Settings]:
    """Where the search starts."""
    features = np.mean([len(recording.features(*pair)) for pair in recording.pairs])
    share = 1.0 / features if params["loading_scaling"] == "pair" else 1.0
    return [
        {"loading_ridge": float(strength * share), "latent_ridge": strength, "roughness": strength * seconds**2}
        for strength in START_STRENGTHS
        for seconds in (steps * params["latent_step"] for steps in START_TIMESCALES)
    ]


def _scaled(settings: Settings, strength: float, timescale: float) -> Settings:
    return {
        "loading_ridge": settings["loading_ridge"] * strength,
        "latent_ridge": settings["latent_ridge"] * strength,
        "roughness": settings["roughness"] * strength * timescale**2,
    }


def _timescale(settings: Settings) -> float:
    """Seconds."""
    return float(np.sqrt(settings["roughness"] / settings["latent_ridge"]))


def _share(recording: Recording, folds: list[Fold]) -> float:
    """Share of the participant-runs' rows that a fold trains on, mean over folds."""
    rows = [_rows(fold.training(recording)) for fold in folds]
    return float(np.mean(rows)) / _rows(recording)


def _rows(recording: Recording) -> int:
    """Rows with a finite entry."""
    return int(sum(np.sum(stream.summary.row_observed > 0) for stream in recording.streams()))


def _same(a: Settings, b: Settings) -> bool:
    """Whether b has the settings of a, numbers but for rounding."""
    return all(
        np.isclose(a[name], b[name], rtol=1e-9, atol=0) if isinstance(a[name], float) else a[name] == b[name]
        for name in a
    )


def _ratio(sse: np.ndarray, sst: np.ndarray) -> np.ndarray:
    return np.where(sst > 0, 1.0 - sse / np.where(sst > 0, sst, 1.0), np.nan)


def _mean(r2: np.ndarray) -> np.ndarray:
    """Mean over the last axis without NaN, NaN where there is nothing else."""
    known = np.isfinite(r2)
    return np.where(
        known.any(axis=-1), np.where(known, r2, 0.0).sum(axis=-1) / np.maximum(known.sum(axis=-1), 1), np.nan
    )


def _column(values: list[Any]) -> np.ndarray:
    numbers = all(isinstance(value, int | float) for value in values)
    return np.array(values if numbers else [str(value) for value in values])
