"""What is held out in each fold: whole runs, time blocks of streams, or participants (DESIGN 9).

A fold says which recording a model may be trained on and which questions are then asked of it. Held-out samples are
removed or NaN in everything a predictor sees, so that no bit of a fit depends on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from msrm.evaluation.question import Learned, Pair, Questions, Targets
from msrm.recording import Recording
from msrm.stream import Stream

Key = tuple[str, str, str]
HOLD_OUTS = ("runs", "blocks", "participants")
# Blocks of a run for each fold: several short blocks see more of the run's moods than one long one.
BLOCKS_PER_FOLD = 2


@dataclass(frozen=True)
class Step:
    """One prediction after one training.

    Attributes
    ----------
    learned : Learned
        Everything learned from, the calibration included.
    calibration : Recording or None
        What a new participant's loadings are learned from before predicting.
    sources : Recording
        What may be seen in the held-out runs; holds the targets' own streams where only samples of them are hidden.
    truth : Recording
        Held-out values, NaN elsewhere.
    targets : Targets or None
        Streams removed together before predicting; None where hidden samples are NaN already.
    """

    learned: Learned
    calibration: Recording | None
    sources: Recording
    truth: Recording
    targets: Targets | None


class Fold(Protocol):
    """One training and the predictions after it."""

    @property
    def name(self) -> str:
        """What is held out, in words."""
        ...

    def training(self, recording: Recording) -> Recording:
        """What the model is fitted to."""
        ...

    def steps(self, recording: Recording, targets: Questions | None) -> list[Step]:
        """What it is then asked; each pair in turn when no targets are named."""
        ...


@dataclass(frozen=True)
class RunFold:
    """Whole runs are held out; targets are predicted from the other streams of those runs."""

    runs: tuple[str, ...]

    @property
    def name(self) -> str:
        """The held-out runs."""
        return ", ".join(self.runs)

    def training(self, recording: Recording) -> Recording:
        """All other runs."""
        return recording.drop(runs=self.runs)

    def steps(self, recording: Recording, targets: Questions | None) -> list[Step]:
        """One step for each target pair that was also trained, or for each of the named targets."""
        training = self.training(recording)
        learned = Learned(training)
        held_out = recording.select(runs=self.runs)
        unknown = [pair for pair in held_out.pairs if pair not in training.pairs]
        if unknown:
            held_out = held_out.drop(targets=grouped(unknown))
        return [
            Step(learned, None, *removed(held_out, asked), asked)
            for asked in (restricted(held_out, own) for own in questions(held_out, targets))
            if asked and len(set(pairs_of(asked))) < len(held_out.pairs)
        ]


@dataclass(frozen=True)
class BlockFold:
    """Time blocks of streams are hidden; everything around them may be seen.

    Attributes
    ----------
    number : int
    hidden : {(participant, run, modality): (time,) bool}
    """

    number: int
    hidden: dict[Key, np.ndarray]

    @property
    def name(self) -> str:
        """The fold's number, from 1."""
        return f"blocks {self.number + 1}"

    def training(self, recording: Recording) -> Recording:
        """The recording with the hidden samples NaN; a stream with nothing else is left out."""
        return _masked(recording, {key: ~rows for key, rows in self.hidden.items()})

    def steps(self, recording: Recording, targets: Questions | None) -> list[Step]:
        """One step: predict what is hidden from all that is not."""
        training = self.training(recording)
        nothing = {(s.participant, s.run, s.modality): np.zeros(s.n_times, bool) for s in recording.streams()}
        seen = {key: rows for key, rows in self.hidden.items() if training.has(*key)}
        return [Step(Learned(training), None, training, _masked(recording, nothing | seen), None)]


@dataclass(frozen=True)
class ParticipantFold:
    """A participant is new: calibrated on all of their runs but one, which is predicted from the other participants."""

    participant: str

    @property
    def name(self) -> str:
        """The participant."""
        return self.participant

    def training(self, recording: Recording) -> Recording:
        """All other participants."""
        return recording.drop(participants=[self.participant])

    def steps(self, recording: Recording, targets: Questions | None) -> list[Step]:
        """One step for each of the participant's runs, with all of their streams, or the named ones, as targets."""
        others, own = self.training(recording), recording.select(participants=[self.participant])
        steps = []
        for run in own.runs:
            calibration, held_out = own.drop(runs=[run]), own.select(runs=[run])
            pairs = [pair for pair in held_out.pairs if pair in calibration.pairs]
            if targets is not None:
                pairs = [pair for pair in pairs if any(pair in pairs_of(own) for own in targets)]
            if pairs and run in others.runs:
                learned = Learned(Recording._trusted([*others.streams(), *calibration.streams()]))
                sources = others.select(runs=[run])
                truth = Recording._trusted([s for s in held_out.streams() if (s.participant, s.modality) in pairs])
                steps.append(Step(learned, calibration, sources, truth, grouped(pairs)))
        return steps


def make_folds(
    recording: Recording, hold_out: str, *, folds: int | None = None, targets: Questions | None = None, seed: int = 0
) -> list[Fold]:
    """The folds of an evaluation.

    Parameters
    ----------
    hold_out : {"runs", "blocks", "participants"}
    folds : int, optional
        Their number: by default every run (or participant) is a fold, and blocks make 5.
    targets : sequence of Targets, optional
        For blocks: the only streams with hidden samples, those of one entry at the same times. Without targets every
        stream has hidden blocks, at different times where there are enough folds.
    seed : int
        Shuffles which runs, participants or blocks go together.

    Raises
    ------
    ValueError
        When the recording is too small for what is asked, with what would be possible.
    """
    if hold_out not in HOLD_OUTS:
        raise ValueError(f"hold_out must be one of {', '.join(map(repr, HOLD_OUTS))}, found {hold_out!r}.")
    if folds is not None and folds < 2:
        raise ValueError(f"folds must be at least 2, found {folds}.")
    rng = np.random.default_rng(seed)
    if hold_out == "blocks":
        return _block_folds(recording, 5 if folds is None else folds, targets, rng)
    names = recording.runs if hold_out == "runs" else recording.participants
    if len(names) < 2:
        other = "'blocks'" if hold_out == "runs" else "'runs' or 'blocks'"
        raise ValueError(
            f"hold_out={hold_out!r} needs at least 2 {hold_out}, the recording has {len(names)}; use {other}."
        )
    if hold_out == "participants":
        if folds is not None:
            raise ValueError("hold_out='participants' makes one fold of each participant; leave folds out.")
        if len(recording.runs) < 2:
            raise ValueError(
                "hold_out='participants' calibrates a new participant on other runs than the one it predicts, "
                f"and the recording has only {recording.runs[0]}; use hold_out='blocks'."
            )
        wanted = [name for name in names if targets is None or any(name in own for own in targets)]
        return [ParticipantFold(name) for name in wanted]
    if folds is None or folds >= len(names):
        return [RunFold((name,)) for name in names]
    groups = np.array_split(rng.permutation(len(names)), folds)
    return [RunFold(tuple(names[at] for at in sorted(group))) for group in groups]


def _block_folds(recording: Recording, folds: int, targets: Questions | None, rng: np.random.Generator) -> list[Fold]:
    turns = {pair: turn for turn, own in enumerate(questions(recording, targets)) for pair in pairs_of(own)}
    hidden: list[dict[Key, np.ndarray]] = [{} for _ in range(folds)]
    for run in recording.runs:
        streams = recording.streams(run=run)
        first = min(stream.interval[0] for stream in streams)
        last = max(stream.interval[1] for stream in streams)
        edges = np.linspace(first, last, BLOCKS_PER_FOLD * folds + 1)[1:-1]
        owner = rng.permutation(np.arange(BLOCKS_PER_FOLD * folds) % folds)
        for stream in streams:
            pair = (stream.participant, stream.modality)
            if pair not in turns:
                continue
            fold_of_row = (owner[np.searchsorted(edges, stream.times, side="right")] + turns[pair]) % folds
            observed = stream.summary.row_observed > 0
            for fold in range(folds):
                rows = fold_of_row == fold
                if (rows & observed).any():
                    hidden[fold][stream.participant, run, stream.modality] = rows
    return [BlockFold(number, rows) for number, rows in enumerate(hidden) if rows]


def _masked(recording: Recording, kept: dict[Key, np.ndarray]) -> Recording:
    """The recording with only the kept rows (time,) of the streams named, without streams that have nothing left."""
    streams = []
    for stream in recording.streams():
        rows = kept.get((stream.participant, stream.run, stream.modality))
        if rows is None:
            streams.append(stream)
        elif (rows & (stream.summary.row_observed > 0)).any():
            streams.append(_only(stream, rows))
    return Recording._trusted(streams)


def _only(stream: Stream, rows: np.ndarray) -> Stream:
    values = np.where(rows[:, None], stream.values, np.nan)
    return replace(stream, data=stream.data.copy(data=values), stored=None)


def removed(recording: Recording, targets: Targets) -> tuple[Recording, Recording]:
    """Sources and truth: the recording without the targets, and the targets alone."""
    pairs = pairs_of(targets)
    truth = [stream for stream in recording.streams() if (stream.participant, stream.modality) in pairs]
    return recording.drop(targets=targets), Recording._trusted(truth)


def restricted(recording: Recording, targets: Targets) -> dict[str, list[str]]:
    """The targets that the recording has."""
    return grouped([pair for pair in pairs_of(targets) if pair in recording.pairs])


def pairs_of(targets: Targets) -> list[Pair]:
    """(participant, modality) of every target."""
    return [(participant, modality) for participant, modalities in targets.items() for modality in modalities]


def grouped(pairs: Sequence[Pair]) -> dict[str, list[str]]:
    """{participant: [modality]} of the pairs."""
    out: dict[str, list[str]] = {}
    for participant, modality in pairs:
        out.setdefault(participant, []).append(modality)
    return out


def questions(recording: Recording, targets: Questions | None) -> list[Targets]:
    """The targets to be removed together, one after the other: those named, or each stream of the recording."""
    return [grouped([pair]) for pair in recording.pairs] if targets is None else list(targets)


def checked_targets(
    recording: Recording, targets: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
) -> Questions | None:
    """Targets as a list of {participant: [modality]}, refused when the recording does not have them.

    Raises
    ------
    ValueError
        Naming the participant and modality, and what there is.
    """
    if targets is None:
        return None
    checked = []
    for asked in (targets,) if isinstance(targets, Mapping) else targets:
        out = {p: [names] if isinstance(names, str) else list(names) for p, names in asked.items()}
        for participant, modality in pairs_of(out):
            recording.features(participant, modality)
        if not pairs_of(out):
            raise ValueError("targets names no stream; give {participant: [modality, ...]}, or None for each in turn.")
        checked.append(out)
    return checked
