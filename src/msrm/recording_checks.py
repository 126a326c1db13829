"""Checks that need several streams of a recording: names that agree, runs that can be one timeline, and warnings.

Each check takes all streams, in the order participant, run, modality. Refusals are ``ValueError``; what is allowed
but deserves a look is one :class:`~msrm.stream.RecordingWarning` for each kind, which counts the cases.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from msrm.stream import RecordingWarning, Stream
from msrm.warned import warn_caller

SHOWN = 5
LONG_STEP = 100.0
LONG_RUN = 12 * 3600.0


def refuse(streams: Sequence[Stream]) -> None:
    """Refuse feature names that differ between runs, and runs that are no common timeline."""
    for pair in _grouped(streams, "participant", "modality"):
        _same_features(pair)
    for run in _grouped(streams, "run"):
        _connected(run)
        positive_duration(run)


def positive_duration(run: Sequence[Stream]) -> None:
    """Refuse a run whose observed times are one moment."""
    first = min(stream.interval[0] for stream in run)
    last = max(stream.interval[1] for stream in run)
    if not last > first:
        raise ValueError(
            f"{run[0].run}: all observed rows are at {first:.12g} s, so the run has no duration. Leave the run out."
        )


def warn(streams: Sequence[Stream]) -> None:
    """Warn about features without information, about what is absent, and about times that are hardly seconds."""
    _warn_features(streams)
    _warn_absent(streams)
    for run in _grouped(streams, "run"):
        _warn_clocks(run)


def _grouped(streams: Iterable[Stream], *names: str) -> list[list[Stream]]:
    groups: dict[tuple[str, ...], list[Stream]] = {}
    for stream in streams:
        groups.setdefault(tuple(getattr(stream, name) for name in names), []).append(stream)
    return list(groups.values())


def _same_features(pair: Sequence[Stream]) -> None:
    first = pair[0]
    for other in pair[1:]:
        if other.n_features != first.n_features:
            raise ValueError(
                f"{first.modality!r} of {first.participant} has {first.n_features} features in {first.run} and "
                f"{other.n_features} in {other.run}; a modality has the same features in every run of a participant."
            )
        differs = np.flatnonzero(first.features != other.features)
        if differs.size:
            at = differs[0]
            names = f"{str(first.features[at])!r} in {first.run} and {str(other.features[at])!r} in {other.run}"
            raise ValueError(
                f"{first.modality!r} of {first.participant}: feature {at} is {names} ({differs.size} names differ). "
                "Give every run the same features in the same order."
            )


def _connected(run: Sequence[Stream]) -> None:
    """Refuse a run that falls into parts without any time in common."""
    ordered = sorted(run, key=lambda stream: float(stream.times[0]))
    latest = ordered[0]
    for stream in ordered[1:]:
        if stream.times[0] > latest.times[-1]:
            spans = [f"{s.modality!r} of {s.participant} spans {_span(s)}" for s in (latest, stream)]
            raise ValueError(
                f"{stream.run}: {spans[0]}, {spans[1]}: they share no time. Streams of one run are on one timeline; "
                "mend the start times, or give them different runs."
            )
        if stream.times[-1] > latest.times[-1]:
            latest = stream


def _span(stream: Stream) -> str:
    return f"{stream.times[0]:.12g} to {stream.times[-1]:.12g} s"


def _warn_features(streams: Sequence[Stream]) -> None:
    """Count features that are constant, or missing, in all runs of their participant and modality."""
    constant: list[tuple[str, list[str]]] = []
    absent: list[tuple[str, list[str]]] = []
    for pair in _grouped(streams, "participant", "modality"):
        observed = np.sum([stream.summary.observed for stream in pair], axis=0)
        lowest = np.fmin.reduce([stream.summary.minimum for stream in pair], axis=0)
        highest = np.fmax.reduce([stream.summary.maximum for stream in pair], axis=0)
        label = f"{pair[0].modality!r} of {pair[0].participant}"
        for cases, which in ((absent, observed == 0), (constant, lowest == highest)):
            if which.any():
                cases.append((label, pair[0].features[which].tolist()))
    for cases, what in ((absent, "missing in all runs"), (constant, "constant over all runs")):
        if cases:
            each = "; ".join(f"{len(names)} in {label} ({_listed(names)})" for label, names in cases[:SHOWN])
            count = sum(len(names) for _, names in cases)
            _warn(f"{count} {'feature is' if count == 1 else 'features are'} {what}", each, len(cases))


def _warn_absent(streams: Sequence[Stream]) -> None:
    """Count participants without some runs, and their runs without some of the participant's modalities."""
    runs = list(dict.fromkeys(stream.run for stream in streams))
    short, thin = [], []
    for own in _grouped(streams, "participant"):
        modalities = list(dict.fromkeys(stream.modality for stream in own))
        present = {(stream.run, stream.modality) for stream in own}
        has = {run for run, _ in present}
        if len(has) < len(runs):
            short.append(f"{own[0].participant} lacks {_listed([run for run in runs if run not in has])}")
        for run in runs:
            lacking = [m for m in modalities if (run, m) not in present]
            if run in has and lacking:
                thin.append(f"{own[0].participant} in {run} lacks {_listed(lacking)}")
    if short:
        who = "1 participant is" if len(short) == 1 else f"{len(short)} participants are"
        _warn(f"{who} without some runs", "; ".join(short[:SHOWN]), len(short))
    if thin:
        what = "1 run of a participant is" if len(thin) == 1 else f"{len(thin)} runs of participants are"
        _warn(f"{what} without some modalities", "; ".join(thin[:SHOWN]), len(thin))


def _warn_clocks(run: Sequence[Stream]) -> None:
    """Times that look like sample numbers or milliseconds, judged by themselves and by the run's other streams."""
    spans = {stream.label: float(stream.times[-1] - stream.times[0]) for stream in run}
    for stream in run:
        if stream.n_times < 2:
            continue
        span, step = spans[stream.label], float(np.median(np.diff(stream.times)))
        others = [s for label, s in spans.items() if label != stream.label and s > 0]
        usual = float(np.median(others)) if others else span
        counts = np.array_equal(stream.times, stream.times[0] + np.arange(stream.n_times)) and stream.times[0] in (0, 1)
        if step >= LONG_STEP or span >= LONG_RUN or 500 < span / usual < 2000:
            _warn(f"{stream.label}: a sample every {step:g} s for {span:g} s", "do the times count milliseconds?", 1)
        elif counts and not 0.7 < span / usual < 1.35:
            _warn(
                f"{stream.label}: times are {stream.times[0]:g}, {stream.times[1]:g}, ... {stream.times[-1]:g} s while "
                f"the run's other streams last {usual:g} s",
                "do the times count samples?",
                1,
            )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(str(name) for name in names[:SHOWN]) + more


def _warn(what: str, cases: str, count: int) -> None:
    more = f"; and {count - SHOWN} more" if count > SHOWN else ""
    warn_caller(f"{what}: {cases}{more}", RecordingWarning)
