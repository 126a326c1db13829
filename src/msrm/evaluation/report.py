"""`score` and `evaluate`: held-out scores of a model beside the baselines, as one Dataset (DESIGN 9).

Owns how sums of scores become the report. How they are made is :mod:`msrm.evaluation.answers`. Which
samples are held out is :mod:`msrm.evaluation.holdout`, what is scored :mod:`msrm.evaluation.scores`.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import xarray as xr

from msrm.asking import takes_recording
from msrm.evaluation.answers import BASELINES, FIT, Piece, Tally, has_source, step_tally
from msrm.evaluation.holdout import Fold, Step, checked_targets, make_folds, pairs_of, questions, removed
from msrm.evaluation.matching import Matched
from msrm.evaluation.question import SOURCES, Learned, Questions, Targets
from msrm.evaluation.scores import LEVELS, Scores, pool
from msrm.recording import Recording
from msrm.runtime.workers import parallel_map
from msrm.stream import Stream


class Estimator(Protocol):
    """An unfitted model: scikit-learn's parameter names, and ``fit``."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Constructor arguments."""
        ...

    def fit(self, recording: Recording) -> Any:
        """Fit, and return self."""
        ...


def clone(estimator: Any, **settings: Any) -> Any:
    """An unfitted copy of an estimator, some of its settings replaced."""
    params = {name: copy.deepcopy(value) for name, value in estimator.get_params(deep=False).items()}
    return type(estimator)(**(params | settings))


def score(
    fitted: Any,
    recording: Recording,
    *,
    training: Recording | None = None,
    targets: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    source: str = "both",
    baselines: Iterable[str] = tuple(BASELINES),
    n_shifts: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score a fitted model's predictions of a recording it has not seen, beside the baselines.

    Parameters
    ----------
    fitted : fitted estimator
    recording : Recording
        Held-out runs, with the targets' values in it; they are removed before anything is predicted.
    training : Recording, optional
        What the model was fitted to. Needed by the baselines that learn, and by models that keep no training means
        and sds.
    targets : {participant: [modality, ...]} or a list of them, optional
        Streams removed and predicted together, one entry of a list after the other; by default each stream in turn,
        from all others that `source` admits.
    source : {"within", "across", "both"}
        Predict from the target's participant, from the other participants, or from all.
    baselines : iterable of str
        Of ``"training_mean"``, ``"interpolation"``, ``"across_participants"``, ``"ridge"``.
    n_shifts : int
        Random circular shifts behind each p-value; 0 for none.
    seed : int
        Of those shifts.

    Returns
    -------
    Dataset
        By ``stream`` and ``predictor`` (``"fit"`` and the baselines): ``r2`` (pooled over finite held-out entries in
        training sd units, NaN where the denominator is 0), ``correlation``, ``log_density`` (nats an entry, training
        sd units), ``coverage`` of the central intervals ``level``, p-values ``r2_p``, ``correlation_p`` and
        ``log_density_p``, ``r2_by_run``, ``matching`` (the share of 15 s segments whose prediction is the best match of
        all predicted segments) and ``matching_chance``; by predictor the same over all streams (``overall_...``); by
        stream ``entries``.
        All predictors are compared on the entries that the model supports. ``attrs["notes"]`` says which baseline does
        not apply and why.

    Raises
    ------
    TypeError
        When the first two arguments are swapped.
    ValueError
        For targets, sources or baselines that are not there, or a target stream that the model was fitted to.
    """
    if isinstance(fitted, Recording) or not isinstance(recording, Recording):
        found = f"{type(fitted).__name__}, {type(recording).__name__}"
        raise TypeError(f"score takes a fitted model, then a Recording: score(fitted, recording); got {found}.")
    asked_for, chosen = checked_targets(recording, targets), _checked(source, baselines)
    tally, learned = Tally(), Learned(training)
    for asked in questions(recording, asked_for):
        if len(recording.pairs) <= len(pairs_of(asked)):
            raise ValueError(f"Nothing is left to predict {_named(asked)} from; name fewer targets.")
        _check_held_out(fitted, recording, training, asked)
        if asked_for is not None or has_source(recording, asked, source):
            step = Step(learned, None, *removed(recording, asked), asked)
            tally.add(step_tally(fitted, step, source, chosen))
    _some(tally, source)
    return report(tally, recording, seed=seed, n_shifts=n_shifts, source=source, hold_out="given")


@takes_recording
def evaluate(
    estimator: Any,
    recording: Recording,
    *,
    hold_out: str = "runs",
    folds: int | None = None,
    targets: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    source: str | None = None,
    baselines: Iterable[str] = tuple(BASELINES),
    n_shifts: int = 1000,
    seed: int = 0,
    n_jobs: int = 1,
    progress: bool | None = None,
) -> xr.Dataset:
    """Fit copies of a model to parts of a recording and score them on the rest.

    Parameters
    ----------
    estimator : estimator
        Left as it is; every fold fits a copy, choosing penalties inside the fold when the estimator chooses them.
    recording : Recording
    hold_out : {"runs", "blocks", "participants"}
        ``"runs"``: each stream of a new run is predicted from the run's other streams. ``"blocks"``: time blocks of
        every stream are hidden, at different times, and predicted from all that is not hidden. ``"participants"``:
        a new participant is calibrated on all runs but one, which is predicted from the other participants.
    folds : int, optional
        By default each run, or participant, is a fold, and blocks make 5.
    targets, baselines, n_shifts, seed
        As in :func:`score`; `seed` also shuffles the folds.
    source : {"within", "across", "both"}, optional
        As in :func:`score`; ``"both"`` unless participants are held out, whose source is ``"across"``.
    n_jobs : int
        Processes; -1 for every core that this process may use. Any number gives the same result.
    progress : bool, optional
        A progress bar: on a terminal only by default.

    Returns
    -------
    Dataset
        As :func:`score`, pooled over folds.

    Raises
    ------
    ValueError
        When the recording is too small for the folds, or a name is unknown.
    """
    asked = checked_targets(recording, targets)
    if hold_out == "participants" and source not in (None, "across"):
        raise ValueError(
            f"hold_out='participants' predicts from the other participants; source={source!r} cannot be used."
        )
    source = ("across" if hold_out == "participants" else "both") if source is None else source
    chosen = _checked(source, baselines)
    plan = make_folds(recording, hold_out, folds=folds, targets=asked, seed=seed)
    shared = (estimator, recording, asked, source, chosen)
    tallies = parallel_map(
        fold_tally, [(fold,) for fold in plan], n_jobs=n_jobs, shared=shared, desc="folds", progress=progress
    )
    total = Tally()
    for tally in tallies:
        total.add(tally)
    _some(total, source)
    return report(total, recording, seed=seed, n_shifts=n_shifts, source=source, hold_out=hold_out)


def fold_tally(
    estimator: Any,
    recording: Recording,
    targets: Questions | None,
    source: str,
    baselines: Sequence[str],
    fold: Fold,
    *,
    null: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> Tally:
    """Fit a copy of the estimator, some settings replaced, to a fold's training part and sum its scores on the rest."""
    fitted = clone(estimator, **(settings or {})).fit(fold.training(recording))
    tally = Tally()
    for step in fold.steps(recording, targets):
        if step.targets is None or targets is not None or has_source(step.sources, step.targets, source):
            ready = fitted if step.calibration is None else fitted.calibrate(step.calibration)
            tally.add(step_tally(ready, step, source, baselines, null=null))
    return tally


def _checked(source: str, baselines: Iterable[str]) -> tuple[str, ...]:
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(map(repr, SOURCES))}, found {source!r}.")
    chosen = tuple(baselines)
    for name in chosen:
        if name not in BASELINES:
            raise ValueError(f"No baseline {name!r}; there are {', '.join(BASELINES)}.")
    return chosen


def _check_held_out(fitted: Any, recording: Recording, training: Recording | None, asked: Targets) -> None:
    """Refuse targets that were trained on: their score says nothing about new data."""
    whole = getattr(fitted, "recording_digest_", None) == recording.digest()
    for participant, modality in pairs_of(asked):
        for stream in recording.streams(participant, modality=modality):
            place = participant, stream.run, modality
            if whole or (training is not None and training.has(*place) and _same(stream, training.stream(*place))):
                raise ValueError(
                    f"{stream.label} is in the training recording: it is not held out. Score other runs, or use "
                    "msrm.evaluate, which fits without what it scores."
                )


def _same(one: Stream, other: Stream) -> bool:
    """Whether two streams hold the same values at the same times."""
    if not (np.array_equal(one.times, other.times) and np.array_equal(one.features, other.features)):
        return False
    pairs = zip(vars(one.summary).values(), vars(other.summary).values(), strict=True)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def _some(tally: Tally, source: str) -> None:
    if not tally.pieces:
        raise ValueError(f"No stream could be predicted: none has a source stream that source={source!r} admits.")


def _named(targets: Targets) -> str:
    return ", ".join(f"{m!r} of {p}" for p, m in pairs_of(targets))


def report(tally: Tally, recording: Recording, *, seed: int, n_shifts: int, **attributes: Any) -> xr.Dataset:
    """The Dataset of :func:`score` from all held-out pieces."""
    names = [name for name in (FIT, *BASELINES) if any(name in piece.sums for piece in tally.pieces)]
    pairs = [pair for pair in recording.pairs if any(piece.pair == pair for piece in tally.pieces)]
    runs = [run for run in recording.runs if any(piece.run == run for piece in tally.pieces)]
    rows = [[piece for piece in tally.pieces if piece.pair == pair] for pair in pairs]
    chance = {"n_shifts": n_shifts, "seed": seed}
    by_stream = np.array([[_pooled(own, name, **chance) for name in names] for own in rows], object)
    overall = np.array([_pooled(tally.pieces, name, **chance) for name in names], object)
    by_run = [[[_pooled([p for p in own if p.run == run], name) for name in names] for run in runs] for own in rows]
    matched = [[_matched(own, name) for name in names] for own in rows]
    entries = [int(sum(piece.sums[FIT].entries[0] for piece in own)) for own in rows]
    variables: dict[str, Any] = {
        "entries": ("stream", entries),
        "r2_by_run": (("stream", "run", "predictor"), _table(np.array(by_run, object), "r2")),
        "coverage": (("stream", "predictor", "level"), [[scores.coverage for scores in row] for row in by_stream]),
        "matching": (("stream", "predictor"), [[share for share, _ in row] for row in matched]),
        "matching_chance": (("stream", "predictor"), [[expected for _, expected in row] for row in matched]),
    }
    for quantity in _QUANTITIES:
        variables[quantity] = (("stream", "predictor"), _table(by_stream, quantity))
        variables[f"overall_{quantity}"] = ("predictor", _table(overall, quantity))
    coords = {
        "stream": [f"{p}/{m}" for p, m in pairs],
        "participant": ("stream", [p for p, _ in pairs]),
        "modality": ("stream", [m for _, m in pairs]),
        "predictor": names,
        "run": runs,
        "level": list(LEVELS),
    }
    notes = "; ".join(f"{name} {reason}" for name, reason in tally.notes.items() if name not in names)
    return xr.Dataset(variables, coords, {**attributes, "seed": seed, "n_shifts": n_shifts, "notes": notes})


_QUANTITIES = ("r2", "correlation", "log_density", "r2_p", "correlation_p", "log_density_p")


def _pooled(pieces: Iterable[Piece], name: str, *, n_shifts: int = 0, seed: int = 0) -> Scores:
    return pool([piece.sums[name] for piece in pieces if name in piece.sums], n_shifts=n_shifts, seed=seed)


def _matched(pieces: Iterable[Piece], name: str) -> tuple[float, float]:
    """Share of segments matched, and the share expected by chance."""
    total = sum((piece.matched[name] for piece in pieces if name in piece.matched), Matched())
    return (total.matched / total.tried, total.expected / total.tried) if total.tried else (np.nan, np.nan)


def _table(scores: np.ndarray, quantity: str) -> np.ndarray:
    return np.vectorize(lambda own: getattr(own, quantity), otypes=[float])(scores)
