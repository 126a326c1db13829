"""Rows that a fit uses, the nodes they share, and the interface of the likelihood backends (DESIGN 2, 3.1).

A *node* is a unique (run, modality, time) functional ``g_m(t)``. Owns which rows are usable (both models), the nodes of
a run, what a Gaussian likelihood knows of them (``precision`` D, ``information`` h) and what a backend gives back
(:class:`Evidence`). The sums behind D and h are :mod:`msrm.gp.likelihood`; the backends are in :mod:`msrm.gp`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from msrm.recording import Recording, Stream
from msrm.regularized.domain import usable_rows as rows_inside
from msrm.responses import Response

EDGES = ("trim", "extend")


@dataclass(frozen=True)
class UsableRows:
    """Which rows enter a fit, and the observed domain of each run.

    Attributes
    ----------
    domains : {run: (first, last)}
        Seconds: first and last time of any row with a finite entry, over the modalities that take part.
    rows : {(participant, run, modality): (time,) bool}
    """

    domains: dict[str, tuple[float, float]]
    rows: dict[tuple[str, str, str], np.ndarray]


def usable_rows(
    recording: Recording,
    responses: Mapping[str, Response],
    *,
    edges: str,
    modalities: Iterable[str] | None = None,
) -> UsableRows:
    """Rows with a finite entry whose response fits the run's observed domain (DESIGN 2).

    Parameters
    ----------
    recording : Recording
    responses : {modality: Response}
    edges : {"trim", "extend"}
        ``"trim"`` keeps a row when the envelope of its response over the parameter bounds, ``[t - u_max, t - u_min]``,
        lies inside the domain; ``"extend"`` keeps every row with a finite entry.
    modalities : iterable of str, optional
        Those that take part (positive weight); all of the recording's by default.

    Returns
    -------
    UsableRows

    Raises
    ------
    ValueError
        For an unknown ``edges``, a modality without a response, or a stream without a usable row.
    """
    if edges not in EDGES:
        raise ValueError(f"edges must be 'trim' or 'extend', found {edges!r}.")
    wanted = recording.modalities if modalities is None else tuple(modalities)
    for modality in wanted:
        if modality not in responses:
            raise ValueError(
                f"Modality {modality!r} has no response; there are {', '.join(responses)}. Add responses[{modality!r}]."
            )
    domains, rows = {}, {}
    for run in recording.runs:
        streams = [stream for stream in recording.streams(run=run) if stream.modality in wanted]
        if not streams:
            continue
        intervals = [stream.interval for stream in streams]
        domain = min(first for first, _ in intervals), max(last for _, last in intervals)
        domains[run] = domain
        for stream in streams:
            key = stream.participant, run, stream.modality
            rows[key] = _stream_rows(stream, responses[stream.modality], edges, domain)
    return UsableRows(domains, rows)


def _stream_rows(stream: Stream, response: Response, edges: str, domain: tuple[float, float]) -> np.ndarray:
    observed = stream.summary.row_observed > 0
    if edges == "extend":
        return observed
    low, high = response.envelope()
    usable = rows_inside(stream.times, observed, (low, high), domain)
    if not usable.any():
        raise ValueError(
            f"{stream.label}: no usable row. Its response reaches from {low:g} to {high:g} s before a row over the "
            f"parameter bounds, and the run is observed from {domain[0]:g} to {domain[1]:g} s. "
            "Use edges='extend', or narrower bounds."
        )
    return usable


@dataclass(frozen=True, eq=False)
class NodeGroup:
    """The nodes of one run and modality.

    Attributes
    ----------
    modality : str
    times : (time,) float64
        Seconds, increasing.
    response : Response
    pairs : (node, 2) int, optional
        With Ornstein-Uhlenbeck residuals a node is the difference of two functionals, ``sum_k coefficients[j, k]
        g(times[pairs[j, k]])`` (:attr:`GroupStatistics.coefficients`). Absent, node j is ``g(times[j])``.
    """

    modality: str
    times: np.ndarray
    response: Response
    pairs: np.ndarray | None = None

    @property
    def n_nodes(self) -> int:
        """Nodes of the group."""
        return len(self.times) if self.pairs is None else len(self.pairs)


@dataclass(frozen=True, eq=False)
class GroupStatistics:
    """What the likelihood knows of a group: ``exp(sum_j -g_j' D_j g_j / 2 + h_j' g_j)``.

    Attributes
    ----------
    precision : (P, K, K)
        Distinct values of D. Few without missing entries; keep it that way.
    index : (node,) int
        Which of them a node has.
    information : (node, K)
        h.
    coefficients : (node, 2), optional
        Goes with :attr:`NodeGroup.pairs`.
    """

    precision: np.ndarray
    index: np.ndarray
    information: np.ndarray
    coefficients: np.ndarray | None = None

    @property
    def counts(self) -> np.ndarray:
        """Nodes of each distinct D, (P,)."""
        return np.bincount(self.index, minlength=len(self.precision))


@dataclass(frozen=True, eq=False)
class Evidence:
    """``log integral exp(sum_j -g_j' D_j g_j / 2 + h_j' g_j) p(g) dg`` of one run and its derivatives.

    Attributes
    ----------
    log_evidence : float
        NaN when not ``ok``.
    ok : bool
    diagnostic : str
        Empty, or what failed.
    mean : {modality: (node, K)}
        E[g], the derivative in h; where no gradient is asked for, where the backend has it at hand.
    second_moment : {modality: (P, K, K)}
        Sum of E[g g'] over the nodes of each distinct D: minus two times the derivative in D.
    response_gradient : {modality: {name: float}}
        Derivatives in the free response parameters.
    length_scale_gradient : float
        Per second.
    coefficient_gradient : {modality: (node, 2)}
        Derivatives in the coefficients of groups that have pairs.
    """

    log_evidence: float
    ok: bool = True
    diagnostic: str = ""
    mean: dict[str, np.ndarray] = field(default_factory=dict)
    second_moment: dict[str, np.ndarray] = field(default_factory=dict)
    response_gradient: dict[str, dict[str, float]] = field(default_factory=dict)
    length_scale_gradient: float = 0.0
    coefficient_gradient: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def failed(cls, diagnostic: str) -> "Evidence":
        """The result of a factorization that found no positive definite matrix."""
        return cls(np.nan, False, diagnostic)


class Backend(Protocol):
    """Integrates the latents of each run out of a Gaussian likelihood of its nodes."""

    def evidence(
        self,
        run: str,
        response_values: Mapping[str, Mapping[str, float]],
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
        gradient: bool = True,
    ) -> Evidence:
        """Log evidence of one run; without ``gradient`` only ``log_evidence`` and perhaps ``mean``."""
        ...
