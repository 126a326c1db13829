"""Answers to held-out questions: predictions of the fitted model and of the baselines, and the sums of their scores.

All predictors of a question are scored on the same entries, those that the model supports.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from msrm.evaluation.baselines import AcrossParticipants, Baseline, Interpolation, Prediction, TrainingMean
from msrm.evaluation.holdout import Step, grouped, pairs_of
from msrm.evaluation.matching import Matched, Segments
from msrm.evaluation.question import Array, NotApplicableError, Pair, Question, Targets, standardized
from msrm.evaluation.ridge import Ridge
from msrm.evaluation.scores import ScoreSums, score_sums
from msrm.recording import Recording
from msrm.rotation import feature_blocks
from msrm.stream import Stream, ordered

BASELINES: dict[str, Callable[[Question], Baseline]] = {
    "training_mean": TrainingMean,
    "interpolation": Interpolation,
    "across_participants": AcrossParticipants,
    "ridge": Ridge,
}
FIT = "fit"


@dataclass(frozen=True)
class Piece:
    """Every predictor's scores on one held-out run of a stream, in one fold.

    Attributes
    ----------
    pair : (participant, modality)
    run : str
    sums : {predictor: ScoreSums}
    matched : {predictor: Matched}
    """

    pair: Pair
    run: str
    sums: dict[str, ScoreSums]
    matched: dict[str, Matched]


@dataclass
class Tally:
    """The scored pieces of an evaluation, and which baselines did not apply.

    Attributes
    ----------
    pieces : list of Piece
    notes : {predictor: reason}
    """

    pieces: list[Piece] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Take in the pieces of another step or fold."""
        self.pieces += other.pieces
        self.notes.update(other.notes)


class _Answers:
    """A fitted model's predictions of one target stream, in the same form as a baseline's."""

    def __init__(self, question: Question, tree: xr.DataTree) -> None:
        self.companions: tuple[Stream, ...] = ()
        self._question = question
        participant, modality = question.pair
        self._nodes = [tree[f"{participant}/{stream.run}/{modality}"].dataset for stream in question.truth]

    def predict(self, span: slice, training: list[Array], companions: list[Array]) -> list[Prediction]:
        """Means and variances (time, block), NaN where the model has no support."""
        scale = self._question.scale()
        out: list[Prediction] = []
        for node in self._nodes:
            supported = node["supported"].values[:, None]
            mean = np.where(supported, standardized(node["mean"].values[:, span], scale, span), np.nan)
            variance = node["variance"].values[:, span] / scale.sd[span] ** 2 if "variance" in node else None
            out.append((mean, variance))
        return out

    def exact(self, span: slice) -> list[tuple[Array, Array] | None]:
        """Log density of the truth in training sd units and its probability (time, block), where the model says."""
        scale = self._question.scale()
        return [
            (node["log_density"].values[:, span] + np.log(scale.sd[span]), node["probability"].values[:, span])
            if "log_density" in node
            else None
            for node in self._nodes
        ]


def step_tally(fitted: Any, step: Step, source: str, baselines: Sequence[str], *, null: bool = True) -> Tally:
    """Sums of the scores of a fitted model and the baselines on one step's held-out values."""
    tree = _predictions(fitted, step, source)
    tally = Tally()
    for pair in step.truth.pairs:
        truth = step.truth.streams(participant=pair[0], modality=pair[1])
        question = Question(pair, truth, step.learned, step.sources, source)
        tally.add(scored(question, _Answers(question, tree), baselines, null=null))
    return tally


def scored(question: Question, answers: _Answers, baselines: Sequence[str], *, null: bool = True) -> Tally:
    """Scores of the model and the baselines for each held-out run, on the entries that the model supports.

    Without a null there is no segment matching either: the errors alone.
    """
    predictors: dict[str, Baseline] = {FIT: answers}
    notes = {}
    for name in baselines:
        try:
            predictors[name] = BASELINES[name](question)
        except NotApplicableError as reason:
            notes[name] = str(reason)
    trained = () if question.learned.recording is None else question.learned.streams(question.pair)
    companions = [stream for predictor in predictors.values() for stream in predictor.companions]
    sums: list[dict[str, ScoreSums]] = [{} for _ in question.truth]
    segments = [{name: Segments(stream.times) for name in predictors} for stream in question.truth]
    for span, values in feature_blocks([*question.truth, *trained, *companions]):
        blocks = iter(values)
        truth = [standardized(next(blocks), question.scale(), span) for _ in question.truth]
        training = [standardized(next(blocks), question.scale(), span) for _ in trained]
        for name, predictor in predictors.items():
            along = [next(blocks) for _ in predictor.companions]
            exact = answers.exact(span) if name == FIT else [None] * len(truth)
            for at, (mean, variance) in enumerate(predictor.predict(span, training, along)):
                # The model comes first: where it has no answer, nobody is scored.
                truth[at] = np.where(np.isfinite(mean), truth[at], np.nan) if name == FIT else truth[at]
                found = score_sums(truth[at], mean, variance, null=null, exact=exact[at])
                sums[at][name] = sums[at][name] + found if name in sums[at] else found
                if null:
                    segments[at][name].add(truth[at], mean)
    matched = [{name: own.matched() for name, own in run.items()} for run in segments]
    runs = [stream.run for stream in question.truth]
    return Tally([Piece(question.pair, *piece) for piece in zip(runs, sums, matched, strict=True)], notes)


def _predictions(fitted: Any, step: Step, source: str) -> xr.DataTree:
    """The model's predictions of a step's truth, new measurements' noise in the variance where the model has one."""
    known = inspect.signature(fitted.predict).parameters
    options: dict[str, Any] = {"noise": True} if "noise" in known else {}
    options |= {"truth": step.truth} if "truth" in known else {}
    if step.targets is not None:
        there = Recording._trusted(ordered([*step.sources.streams(), *step.truth.streams()]))
        return fitted.predict(there, targets=step.targets, source=source, **options)
    if source == "both":
        return fitted.predict(step.sources, source=source, **options)
    found: dict[str, Any] = {}
    for pair in step.truth.pairs:
        if has_source(step.sources, grouped([pair]), source):
            tree = fitted.predict(step.sources, targets=grouped([pair]), source=source, **options)
            found |= {leaf.path: leaf.dataset for leaf in tree.leaves}
    return xr.DataTree.from_dict(found)


def has_source(recording: Recording, asked: Targets, source: str) -> bool:
    """Whether a stream besides the targets may be used to predict every one of them."""
    others = [pair for pair in recording.pairs if pair not in pairs_of(asked)]
    within = source in ("within", "both")
    across = source in ("across", "both")
    return all(any(within if q == p else across for q, _ in others) for p in asked)
