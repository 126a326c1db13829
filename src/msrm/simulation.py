"""Simulated recordings with their truth: a shared latent, seen by several streams through their responses.

Within a run K independent unit-variance Matern-3/2 factors are drawn exactly on a grid of 0.05 s and
``y = b + W g(t) + e``, with g the latent seen through the modality's unit-energy response (DESIGN 2) and white e. The
default is the recording whose fits are quoted in the documentation: brain, rating and physiology of five participants.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import singledispatch

import numpy as np
import xarray as xr

from msrm.recording import Recording
from msrm.responses import Gaussian, Identity, Response
from msrm.stream import Stream, make_stream

__all__ = ["Modality", "Truth", "simulate"]

STEP = 0.05
LATENT_STEP = 0.3
PADDING = 12.0


@dataclass(frozen=True)
class Modality:
    """One kind of measurement to simulate.

    Parameters
    ----------
    features : int
    period : float
        Seconds between samples, a multiple of 0.05.
    response : Response
        How it sees the latent; free parameters take their start values.
    noise_sd : float
        In units of the features.
    participants : int, optional
        How many of them, from the first, are measured so; by default all.
    """

    features: int
    period: float
    response: Response = field(default_factory=Identity)
    noise_sd: float = 1.0
    participants: int | None = None

    def __post_init__(self) -> None:
        ticks = round(self.period / STEP)
        if self.features < 1 or self.noise_sd < 0 or (self.participants is not None and self.participants < 1):
            raise ValueError(f"A modality needs at least one feature and participant and noise_sd >= 0; got {self}.")
        if ticks < 1 or abs(self.period - ticks * STEP) > 1e-9:
            raise ValueError(f"The period is a multiple of {STEP} s; got {self.period} s.")


@dataclass(frozen=True)
class Truth:
    """What made a simulated recording.

    Attributes
    ----------
    parameters : dict
        ``loading/{participant}/{modality}`` (feature, factor), ``offset/...`` (feature,), ``noise/...`` (variance),
        ``response/{modality}/{name}`` and ``length_scale`` (seconds), named as fitted parameters are.
    latent : dict
        By run, DataArray (time, factor) every 0.3 s.
    responses : dict
        By modality, with every parameter fixed.
    """

    parameters: dict[str, np.ndarray | float]
    latent: dict[str, xr.DataArray]
    responses: dict[str, Response]


def simulate(
    *,
    features: int | None = None,
    factors: int = 3,
    runs: int = 1,
    seconds: float = 453.6,
    participants: int = 5,
    modalities: Mapping[str, Modality] | None = None,
    missing: float = 0.0,
    gaps: int = 0,
    gap_seconds: float = 20.0,
    length_scale: float = 3.0,
    seed: int = 0,
) -> tuple[Recording, Truth]:
    """A recording of p1, p2, ... in run-1, run-2, ..., and its truth.

    Parameters
    ----------
    features : int, optional
        Of the brain, 360 by default. With ``modalities``, give each its own instead.
    factors, runs, participants : int
    seconds : float
        Length of every run.
    modalities : {name: Modality}, optional
        By default brain every 1.8 s (not measured in the last of several participants), five ratings every 1.2 s
        and two physiological channels every 1.5 s.
    missing : float
        Share of single entries that are missing, at random.
    gaps, gap_seconds : int, float
        Stretches without any row in each stream: how many and how long. They may overlap, and they change no other
        number.
    length_scale : float
        Of the latent, seconds.
    seed : int
        The same arguments give the same bits.

    Returns
    -------
    recording : Recording
    truth : Truth

    Raises
    ------
    ValueError
        For arguments out of range, or when gaps leave a stream without two rows.

    Examples
    --------
    >>> recording, truth = simulate(features=8, participants=2, seconds=60.0)
    >>> recording.stream("p1", "run-1", "brain").values.shape
    (34, 8)
    >>> truth.latent["run-1"].dims
    ('time', 'factor')
    """
    kinds = _modalities(features, participants, modalities)
    _check(factors=factors, runs=runs, participants=participants)
    if not (0 <= missing < 1 and gaps >= 0 and gap_seconds > 0 and length_scale > 0 and seconds >= STEP):
        raise ValueError(
            f"Wanted 0 <= missing < 1, gaps >= 0 and positive gap_seconds, length_scale and seconds; got {missing}, "
            f"{gaps}, {gap_seconds}, {length_scale} and {seconds}."
        )
    rng = np.random.default_rng(seed)
    gap_rng = np.random.default_rng([seed, gaps])
    people = [f"p{i + 1}" for i in range(participants)]
    pairs = [(p, m) for i, p in enumerate(people) for m in kinds if i < (kinds[m].participants or participants)]
    responses = {m: kind.response.with_values() for m, kind in kinds.items()}
    parameters: dict[str, np.ndarray | float] = {"length_scale": length_scale}
    for m, response in responses.items():
        parameters |= {f"response/{m}/{name}": value for name, value in response.start.items()}
    for p, m in pairs:
        parameters[f"loading/{p}/{m}"] = rng.standard_normal((kinds[m].features, factors)) * 0.6
        parameters[f"offset/{p}/{m}"] = rng.standard_normal(kinds[m].features) * 0.5
        parameters[f"noise/{p}/{m}"] = kinds[m].noise_sd ** 2

    taps = {m: _taps(response) for m, response in responses.items()}
    padding = max([round(PADDING / STEP), *(len(tap) + abs(shift) for tap, shift in taps.values())])
    ticks = round(seconds / STEP) + 1
    streams, latent = [], {}
    for run in (f"run-{r + 1}" for r in range(runs)):
        path = matern32_path(ticks + 2 * padding, factors, length_scale, rng)
        latent[run] = _latent(path[padding : padding + ticks : round(LATENT_STEP / STEP)])
        seen = {m: _filtered(path, *taps[m]) for m in kinds}
        for p, m in pairs:
            index = np.arange(0, ticks, round(kinds[m].period / STEP))
            values = seen[m][padding + index] @ np.asarray(parameters[f"loading/{p}/{m}"]).T
            values = values + parameters[f"offset/{p}/{m}"]
            values = values + rng.standard_normal(values.shape) * kinds[m].noise_sd
            if missing:
                values[rng.uniform(size=values.shape) < missing] = np.nan
            streams.append(_with_gaps(p, run, m, values, index * STEP, gaps, gap_seconds, gap_rng))
    return Recording.from_streams(streams), Truth(parameters, latent, responses)


def matern32_path(n: int, factors: int, length_scale: float, rng: np.random.Generator) -> np.ndarray:
    """Exact draws of independent unit-variance Matern-3/2 processes every 0.05 s, (n, factors)."""
    rate = np.sqrt(3.0) / length_scale
    decay = np.exp(-rate * STEP)
    transition = decay * np.array([[1 + rate * STEP, STEP], [-(rate**2) * STEP, 1 - rate * STEP]])
    stationary = np.diag([1.0, rate**2])
    noise = np.linalg.cholesky(stationary - transition @ stationary @ transition.T)
    state = np.linalg.cholesky(stationary) @ rng.standard_normal((2, factors))
    path = np.empty((n, factors))
    for i in range(n):
        path[i] = state[0]
        state = transition @ state + noise @ rng.standard_normal((2, factors))
    return path


def _modalities(
    features: int | None, participants: int, modalities: Mapping[str, Modality] | None
) -> dict[str, Modality]:
    if modalities is not None:
        if features is not None:
            raise ValueError(f"features={features} is of the default brain; with modalities, give each its own.")
        return dict(modalities)
    return {
        "brain": Modality(360 if features is None else features, 1.8, participants=max(1, participants - 1)),
        "rating": Modality(5, 1.2, Gaussian(width=0.6, lag=0.4), 0.5),
        "physiology": Modality(2, 1.5, Gaussian(width=0.8, lag=1.0), 0.7),
    }


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is at least 1; got {count}.")


def _latent(path: np.ndarray) -> xr.DataArray:
    times = LATENT_STEP * np.arange(len(path))
    return xr.DataArray(path, {"time": ("time", times, {"units": "s"})}, ("time", "factor"))


@singledispatch
def _taps(response: Response) -> tuple[np.ndarray, int]:
    """The response on the grid, centred and of odd length, and how many grid steps later it acts."""
    first, last = (round(edge / STEP) for edge in response.support())
    half = max(abs(first), abs(last))
    curve = response.curve(STEP * np.arange(-half, half + 1))
    return curve / np.sqrt(np.sum(curve**2) * STEP) * STEP, 0


@_taps.register
def _(response: Identity) -> tuple[np.ndarray, int]:
    return np.ones(1), 0


@_taps.register
def _(response: Gaussian) -> tuple[np.ndarray, int]:
    values = response.start
    half, shift = int(np.ceil(6 * values["width"] / STEP)), round(values["lag"] / STEP)
    late = values["lag"] - shift * STEP
    u = STEP * np.arange(-half, half + 1) - (0.0 if abs(late) < 1e-9 else late)
    curve = np.exp(-0.5 * (u / values["width"]) ** 2)
    curve /= np.sqrt(np.sum(curve**2) * STEP)
    return curve * STEP, shift


def _filtered(path: np.ndarray, taps: np.ndarray, shift: int) -> np.ndarray:
    """The latent seen through a response; what the roll wraps around stays in the padding."""
    seen = np.stack([np.convolve(factor, taps, mode="same") for factor in path.T], 1)
    return np.roll(seen, shift, axis=0)


def _with_gaps(
    participant: str,
    run: str,
    modality: str,
    values: np.ndarray,
    times: np.ndarray,
    gaps: int,
    length: float,
    rng: np.random.Generator,
) -> Stream:
    """The stream without the rows that fall into gaps at random places."""
    starts = rng.uniform(times[0] - length / 2, times[-1] - length / 2, size=gaps)
    kept = ~((times >= starts[:, None]) & (times < starts[:, None] + length)).any(axis=0)
    stream_times = times[kept]
    if len(stream_times) < 2:
        raise ValueError(
            f"{modality!r} of {participant} in {run} has {len(stream_times)} rows after {gaps} gaps of {length:g} s "
            f"in {times[-1]:g} s; ask for fewer or shorter gaps, or more seconds."
        )
    return make_stream(participant, run, modality, (values[kept], stream_times))
