"""How a recording shows itself: what is in it, its clocks and what is missing, as text and as HTML."""

from collections.abc import Sequence
from html import escape

import numpy as np

from msrm.stream import Stream


def clock(stream: Stream) -> str:
    """The native clock in words: ``every 1.8 s``, or the range of the gaps when it is irregular."""
    if stream.n_times < 2:
        return "one row"
    gaps = np.diff(stream.times)
    step = float(np.median(gaps))
    if gaps.max() - gaps.min() <= 1e-6 * step + 4 * np.spacing(np.abs(stream.times).max()):
        return f"every {step:.4g} s"
    return f"every {step:.4g} s ({gaps.min():.4g} to {gaps.max():.4g})"


def text(streams: Sequence[Stream]) -> str:
    """A few lines: one for the whole, one for each run, one for each modality."""
    widths = [max(len(row[i]) for row in _modality_rows(streams)) for i in range(6)]
    lines = [f"<msrm.Recording: {_counts(streams)}>"]
    for run, own in _by(streams, "run").items():
        lines.append(f"  {run}: {_span(own)}, {_count(len(_by(own, 'participant')), 'participant')}")
    lines += [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in _modality_rows(streams)
    ]
    return "\n".join(lines)


def html(streams: Sequence[Stream]) -> str:
    """A table of modalities, and one of all streams to unfold."""
    rows = [
        (s.participant, s.run, s.modality, f"{s.n_times} x {s.n_features}", _span([s]), clock(s), f"{s.missing:.1%}")
        for s in streams
    ]
    head = ("participant", "run", "modality", "times x features", "span", "clock", "missing")
    return (
        f"<div><b>msrm.Recording</b>: {escape(_counts(streams))}{_table(_modality_rows(streams))}"
        f"<details><summary>{len(streams)} streams</summary>{_table([head, *rows])}</details></div>"
    )


def _counts(streams: Sequence[Stream]) -> str:
    size = sum(stream.n_times * stream.n_features * stream.data.dtype.itemsize for stream in streams)
    counts = [_count(len(_by(streams, kind)), kind) for kind in ("participant", "run")]
    return ", ".join([*counts, _count(len(streams), "stream"), _bytes(size)])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _modality_rows(streams: Sequence[Stream]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("modality", "participants", "features", "times", "clock", "missing")]
    for modality, own in _by(streams, "modality").items():
        clocks = list(dict.fromkeys(clock(stream) for stream in own))
        entries = sum(stream.n_times * stream.n_features for stream in own)
        missing = 1 - sum(int(stream.summary.observed.sum()) for stream in own) / entries
        rows.append(
            (
                modality,
                str(len(_by(own, "participant"))),
                _range([stream.n_features for stream in own]),
                _range([stream.n_times for stream in own]),
                clocks[0] + (f" and {len(clocks) - 1} other clocks" if len(clocks) > 1 else ""),
                f"{missing:.1%}",
            )
        )
    return rows


def _range(numbers: Sequence[int]) -> str:
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _span(streams: Sequence[Stream]) -> str:
    return f"{min(s.times[0] for s in streams):g} to {max(s.times[-1] for s in streams):g} s"


def _by(streams: Sequence[Stream], kind: str) -> dict[str, list[Stream]]:
    groups: dict[str, list[Stream]] = {}
    for stream in streams:
        groups.setdefault(getattr(stream, kind), []).append(stream)
    return groups


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
