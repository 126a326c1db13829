"""What may be fitted, and asked of a fit, checked: targets by participant, sources, times by run (DESIGN 5, 9)."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from msrm.recording import Recording
from msrm.stream import Stream
from msrm.warned import warn_caller

Pair = tuple[str, str]
Targets = Mapping[str, str | Sequence[str]] | None
Times = Any

SOURCES = ("within", "across", "both")


def takes_recording[Function: Callable[..., Any]](function: Function) -> Function:
    """The function, refusing an argument ``recording`` that is none, by the function's name and what was given."""
    parameters = inspect.signature(function).parameters
    place, optional = list(parameters).index("recording"), parameters["recording"].default is None

    @wraps(function)
    def checked(*given: Any, **named: Any) -> Any:
        if len(given) > place or "recording" in named:
            found = given[place] if len(given) > place else named["recording"]
            if not (isinstance(found, Recording) or (found is None and optional)):
                raise TypeError(
                    f"{function.__name__} takes a Recording, got {type(found).__name__}. See msrm.Recording.from_dict."
                )
        return function(*given, **named)

    return cast(Function, checked)


def chosen_pairs(known: Sequence[Pair], recording: Recording, targets: Targets) -> list[Pair]:
    """Target (participant, modality) pairs; every pair of the recording where none are named.

    Parameters
    ----------
    known : sequence of (participant, modality)
        Those of the fit.
    recording : Recording
    targets : {participant: modality or modalities}, optional

    Raises
    ------
    TypeError
        If the targets are no dict.
    ValueError
        For a participant or modality that the fit does not have, or no target at all.
    """
    if targets is None:
        return list(recording.pairs)
    if not isinstance(targets, Mapping):
        raise TypeError(f"targets must be a dict from participant to modalities, got {targets!r}.")
    participants = dict.fromkeys(participant for participant, _ in known)
    out = []
    for participant, names in targets.items():
        if participant not in participants:
            raise ValueError(f"No participant {participant!r} in the fit; there are {', '.join(participants)}.")
        for modality in (names,) if isinstance(names, str) else names:
            if (participant, modality) not in known:
                own = ", ".join(m for p, m in known if p == participant)
                raise ValueError(f"Participant {participant} has no modality {modality!r} in the fit; it has {own}.")
            out.append((participant, modality))
    if not out:
        raise ValueError("targets is empty: name participants and modalities, or leave it out to predict every stream.")
    return out


def check_training(n_factors: Any, recording: Recording) -> None:
    """Warn of more factors than all streams together have features: penalties or priors alone tell them apart.

    Warns
    -----
    UserWarning
        With the number of features.
    """
    total = sum(len(recording.features(*pair)) for pair in recording.pairs)
    if isinstance(n_factors, int | np.integer) and n_factors > total:
        warn_caller(
            f"n_factors={n_factors} exceeds the {total} features of all participants and modalities: the data cannot "
            "tell so many factors apart. Ask for fewer.",
            UserWarning,
        )


def check_variation(recording: Recording) -> None:
    """Refuse streams without variation, whose noise variance has no maximum but the prior's.

    Raises
    ------
    ValueError
        Naming the stream.
    """
    for participant, modality in recording.pairs:
        summaries = [stream.summary for stream in recording.streams(participant, modality=modality)]
        lowest = np.fmin.reduce([summary.minimum for summary in summaries])
        highest = np.fmax.reduce([summary.maximum for summary in summaries])
        if not np.any(highest > lowest):
            raise ValueError(
                f"{modality!r} of {participant}: none of its {len(lowest)} features varies, so there is nothing to "
                "fit. Drop the stream."
            )


def check_runs(times: Times, runs: Sequence[str]) -> None:
    """Refuse times for runs that there are not.

    Raises
    ------
    ValueError
        Naming the run.
    """
    for run in times if isinstance(times, Mapping) else ():
        if run not in runs:
            raise ValueError(f"times names {run!r}; there are {', '.join(runs)}.")


def wanted_times(recording: Recording, participant: str, modality: str, times: Times) -> dict[str, NDArray[np.float64]]:
    """When to predict a target, by run: at the given times, or where it was measured."""
    if times is None:
        return {s.run: s.times for s in recording.streams(participant=participant, modality=modality)}
    found = {run: run_times(times, run, modality) for run in recording.runs}
    return {run: at for run, at in found.items() if at is not None}


def run_times(times: Times, run: str, modality: str | None = None) -> NDArray[np.float64] | None:
    """A run's times in what the caller gave: an array, {run: array} or {run: {modality: array}}.

    Raises
    ------
    ValueError
        Unless they are finite seconds in one dimension.
    """
    given = times.get(run) if isinstance(times, Mapping) else times
    given = given.get(modality) if isinstance(given, Mapping) else given
    if given is None:
        return None
    at = np.asarray(given, float)
    if at.ndim != 1 or not len(at) or not np.isfinite(at).all():
        raise ValueError(
            f"times for {run} must be a non-empty list of finite seconds, got an array of shape {at.shape}."
        )
    return at


def check_features(stream: Stream, features: NDArray[np.str_]) -> None:
    """Refuse features that differ from the fitted ones.

    Raises
    ------
    ValueError
        Naming the first that differs.
    """
    if len(stream.features) != len(features):
        raise ValueError(f"{stream.label}: {len(stream.features)} features; the fit has {len(features)}.")
    if (stream.features != features).any():
        at = int(np.flatnonzero(stream.features != features)[0])
        raise ValueError(
            f"{stream.label}: feature {at} is {str(stream.features[at])!r}; the fit has {str(features[at])!r} there."
        )
