"""Chains on disk become `Draws`: the tree for ArviZ, aligned members for prediction (DESIGN 5).

Everything here is made from the stored draws and the recording; nothing of it can lose a draw.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from msrm.gp.data import Key, NodeLayout
from msrm.gp.draws import Draws
from msrm.gp.ensemble import Ensemble
from msrm.gp.gibbs.design import Design
from msrm.gp.gibbs.state import State
from msrm.gp.parameters import FreeLengthScale, Specification
from msrm.gp.raw_draws import channel_labels
from msrm.gp.raw_rows import raw_rows
from msrm.recording import Recording
from msrm.runtime import available_cores, blas_threads

__all__ = ["ChainDraws", "assembled", "scalar_names"]

Array = NDArray[np.float64]
_TREE_BYTES = 2 * 2**30  # of offsets and loading norms in the tree; beyond it, evenly spaced channels
_PIECE_BYTES, _THREADS = 2**26, 8  # of raw rows turned back at once, and how often at the same time at most
_MEMBERS = 200
_MEMBER_BYTES = 2**28  # of the ensemble


@dataclass(frozen=True, eq=False)
class ChainDraws:
    """Draws of all chains as the samplers store them.

    Attributes
    ----------
    arrays : {name: (chain, draw, ...)}
        ``rows.<i>`` by pair, ``noise``, ``scalars`` as in :meth:`State.arrays`, ``log_likelihood_marginal``,
        ``log_likelihood`` (chain, draw, stream and run).
    stats : {name: (chain, draw, ...)}
        For the group `sample_stats`, with ArviZ's names where it has one.
    stat_labels : {name: labels}
        Of the last dimension of statistics that have one.
    """

    arrays: dict[str, Array]
    stats: dict[str, NDArray[Any]]
    stat_labels: dict[str, list[str]]


def assembled(
    model: Any,
    recording: Recording,
    specification: Specification,
    layout: NodeLayout,
    start: State,
    chains: ChainDraws,
    attributes: dict[str, Any],
) -> Draws:
    """The result of a sampler.

    Parameters
    ----------
    model : GPMSRM
        Fitted: the MAP.
    recording : Recording
    specification : Specification
    layout : NodeLayout
        Rotated, with the data at hand.
    start : State
        Any state of the chains, for its layout; loadings are aligned to it.
    chains : ChainDraws
    attributes : dict
        For the tree: sampler, seed and so on.
    """
    rows = {key: chains.arrays[f"rows.{place}"] for place, key in enumerate(start.rows)}
    names = scalar_names(start)
    scalars = {name: chains.arrays["scalars"][..., place] for place, name in enumerate(names)}
    turns = _turns(specification.n_factors, rows, start)
    posterior, labels = _posterior(
        specification, layout, rows, scalars, chains, model.model_.features, attributes["seed"]
    )
    nodes = {
        "posterior": posterior,
        "sample_stats": _statistics(chains),
        "log_likelihood": _conditional(layout, chains),
        "observed_data": _observed(recording, layout),
        "constant_data": _constants(layout, model).merge(labels),
    }
    tree = xr.DataTree.from_dict(nodes)
    tree.attrs = {"recording_digest": recording.digest(), **attributes}
    empty = Ensemble(model.model_, {}, {}, {}, {}, np.empty((0, 2), np.intp))
    draws = Draws(tree, model, rows, turns, empty, {pair.key: pair for pair in layout.pairs})
    return replace(draws, ensemble=_ensemble(model, specification, layout, start, draws, chains, scalars))


def scalar_names(start: State) -> list[str]:
    """Names of the entries of a state's ``scalars``."""
    names = [f"response/{m}/{name}" for m, values in start.responses.items() for name in values]
    return [*names, "length_scale", *(f"residual_timescale/{m}" for m in start.timescales)]


def _sizes(chains: ChainDraws) -> dict[str, NDArray[np.intp]]:
    n_chains, n_draws = chains.arrays["noise"].shape[:2]
    return {"chain": np.arange(n_chains), "draw": np.arange(n_draws)}


def _posterior(
    specification: Specification,
    layout: NodeLayout,
    rows: dict[Key, Array],
    scalars: dict[str, Array],
    chains: ChainDraws,
    features: dict[Key, NDArray[Any]],
    seed: int,
) -> tuple[xr.Dataset, xr.Dataset]:
    sampled = ("chain", "draw")
    coords: dict[str, Any] = {**_sizes(chains), "stream": [f"{p}/{m}" for p, m in rows]}
    variables: dict[str, Any] = {
        "log_likelihood_marginal": (sampled, chains.arrays["log_likelihood_marginal"]),
        "noise": ((*sampled, "stream"), chains.arrays["noise"]),
    }
    kept, offsets, norms = _channels(specification.n_factors, layout, rows, features, seed)
    labels = channel_labels(kept)
    variables["offset"] = ((*sampled, "channel"), offsets)
    variables["loading_norm2"] = ((*sampled, "channel"), norms)
    responses = {name: values for name, values in scalars.items() if name.startswith("response/")}
    if responses:
        coords["parameter"] = [name.removeprefix("response/") for name in responses]
        variables["response"] = ((*sampled, "parameter"), np.stack(list(responses.values()), axis=-1))
    if isinstance(specification.length_scale, FreeLengthScale):
        variables["length_scale"] = (sampled, scalars["length_scale"])
    learned = [m for m in dict.fromkeys(m for _, m in rows) if specification.residual(m).free is not None]
    if learned:
        coords["modality_name"] = learned
        values = [scalars[f"residual_timescale/{m}"] for m in learned]
        variables["residual_timescale"] = ((*sampled, "modality_name"), np.stack(values, axis=-1))
    # Only `channel` itself goes along: ArviZ cannot stack variables of which some have further coordinates.
    return xr.Dataset(variables, {**coords, **labels.coords}), labels


def _channels(
    size: int, layout: NodeLayout, rows: dict[Key, Array], features: dict[Key, NDArray[Any]], seed: int
) -> tuple[dict[Key, NDArray[Any]], Array, Array]:
    """Offsets and squared loading norms of raw features with data (chain, draw, channel), all or evenly spaced ones."""
    n_chains, n_draws = next(iter(rows.values())).shape[:2]
    total = sum(len(names) for names in features.values())
    every = max(1, int(np.ceil(16 * n_chains * n_draws * total / _TREE_BYTES)))
    pairs = {pair.key: pair for pair in layout.pairs}
    chosen = {}
    for place, (key, pair) in enumerate(pairs.items()):
        first = raw_rows(pair, rows[key][0, :1], [(seed, 0, 0, place)])[0]
        chosen[key] = np.flatnonzero(np.isfinite(first[:, size]))[::every]
    kept = {key: names[chosen[key]] for key, names in features.items()}
    stops = np.cumsum([len(names) for names in kept.values()])
    offsets, norms = (np.empty((n_chains, n_draws, stops[-1])) for _ in range(2))

    def turned_back(place: int, key: Key, chain: int, start: int, piece: int) -> None:
        stop = int(stops[place])
        part, span = slice(start, min(start + piece, n_draws)), slice(stop - len(kept[key]), stop)
        seeds = [(seed, chain, draw, place) for draw in range(part.start, part.stop)]
        raw = raw_rows(pairs[key], rows[key][chain, part], seeds)[:, chosen[key]]
        offsets[chain, part, span] = raw[..., size]
        norms[chain, part, span] = np.square(raw[..., :size]).sum(axis=-1)

    # In pieces: raw rows of all draws at once would not fit for whole-brain data. Products and normals leave Python.
    with blas_threads(1), ThreadPoolExecutor(min(_THREADS, available_cores())) as pool:
        jobs = []
        for place, key in enumerate(kept):
            piece = max(1, _PIECE_BYTES // (8 * len(features[key]) * (size + 1)))
            for chain, start in product(range(n_chains), range(0, n_draws, piece)):
                jobs.append(pool.submit(turned_back, place, key, chain, start, piece))
        for job in jobs:
            job.result()
    return kept, offsets, norms


def _statistics(chains: ChainDraws) -> xr.Dataset:
    variables, coords = {}, dict(_sizes(chains))
    for name, values in chains.stats.items():
        dims: tuple[str, ...] = ("chain", "draw")
        if values.ndim == 3:
            dims, coords[f"{name}_of"] = (*dims, f"{name}_of"), np.array(chains.stat_labels[name])
        variables[name] = (dims, values)
    return xr.Dataset(variables, coords)


def _stream_runs(layout: NodeLayout) -> list[tuple[str, str, str]]:
    return [(*pair.key, run) for pair in layout.pairs for run in layout.rows[pair.key].runs]


def _conditional(layout: NodeLayout, chains: ChainDraws) -> xr.Dataset:
    """Log likelihood given the latents, by participant, modality and run."""
    return xr.Dataset(
        {"stream": (("chain", "draw", "stream_run"), chains.arrays["log_likelihood"])},
        {**_sizes(chains), "stream_run": ["/".join(names) for names in _stream_runs(layout)]},
    )


def _observed(recording: Recording, layout: NodeLayout) -> xr.Dataset:
    """A summary of each stream, not a copy."""
    names = _stream_runs(layout)
    streams = [recording.stream(p, run, m) for p, m, run in names]
    return xr.Dataset(
        {
            "scalars": ("stream_run", [int(s.summary.row_observed.sum()) for s in streams]),
            "rows": ("stream_run", [s.n_times for s in streams]),
            "first": ("stream_run", [float(s.times[0]) for s in streams], {"units": "s"}),
            "last": ("stream_run", [float(s.times[-1]) for s in streams], {"units": "s"}),
        },
        {"stream_run": ["/".join(name) for name in names]},
    )


def _constants(layout: NodeLayout, model: Any) -> xr.Dataset:
    labels = [f"{pair.participant}/{pair.modality}" for pair in layout.pairs]
    return xr.Dataset(
        {
            "features": ("stream", [pair.n_features for pair in layout.pairs]),
            "coordinates": ("stream", [pair.n_coordinates for pair in layout.pairs]),
            "n_factors": ((), model.n_factors),
        },
        {"stream": labels},
    )


def _turns(size: int, rows: dict[Key, Array], start: State) -> Array:
    """Rotations (chain, draw, K, K) that bring loadings closest to the start's, streams weighed by precision."""
    cross: Array = np.zeros(())
    for key, draws in rows.items():
        reference = start.rows[key][: draws.shape[2], :size] / start.noise[key]
        cross = cross + np.einsum("cdrk,rl->cdkl", draws[..., :size], reference)
    left, _, right = np.linalg.svd(cross)
    return left @ right


def _ensemble(
    model: Any,
    specification: Specification,
    layout: NodeLayout,
    start: State,
    draws: Draws,
    chains: ChainDraws,
    scalars: dict[str, Array],
) -> Ensemble:
    """Evenly spaced draws in raw features, factors aligned."""
    n_chains, n_draws = chains.arrays["noise"].shape[:2]
    raw = sum(8 * pair.n_features * (specification.n_factors + 1) for pair in layout.pairs)
    count = max(1, min(_MEMBERS, n_chains * n_draws, _MEMBER_BYTES // raw))
    chosen = np.unique(np.linspace(0, n_chains * n_draws - 1, count).astype(np.intp))
    members = [(int(i) // n_draws, int(i) % n_draws) for i in chosen]
    parameters: dict[str, list[Array]] = {}
    sums: dict[str, dict[tuple[str, str], list[Array]]] = {"precision": {}, "information": {}, "coefficients": {}}
    for place, pair in enumerate(layout.pairs):
        own = np.array([draws.rows[pair.key][c, d] for c, d in members])
        back = raw_rows(pair, own, [(int(draws.tree.attrs["seed"]), c, d, place) for c, d in members])
        for values, (c, d) in zip(back, members, strict=True):
            for name, value in _named(specification, pair, values, draws.turns[c, d]).items():
                parameters.setdefault(name, []).append(value)
            noise = chains.arrays["noise"][c, d, place]
            parameters.setdefault(f"noise/{pair.participant}/{pair.modality}", []).append(noise)
    for c, d in members:
        for name in (name for name in scalars if name in model.model_.parameters):
            parameters.setdefault(name, []).append(scalars[name][c, d])
        state = start.from_arrays({name: chains.arrays[name][c, d] for name in start.arrays()})
        for kind, by_place in _node_sums(specification, layout, state, draws.turns[c, d]).items():
            for where, value in by_place.items():
                sums[kind].setdefault(where, []).append(value)
    stacked = {kind: {where: np.array(values) for where, values in parts.items()} for kind, parts in sums.items()}
    arrays = {name: np.array(values) for name, values in parameters.items()}
    return Ensemble(
        model.model_,
        arrays,
        stacked["precision"],
        stacked["information"],
        stacked["coefficients"],
        np.array(members, np.intp),
    )


def _named(specification: Specification, pair: Any, rows: Array, turn: Array) -> dict[str, Array]:
    """Parameters of one pair by name, in raw features, factors turned."""
    size, name = specification.n_factors, f"{pair.participant}/{pair.modality}"
    out = {f"loading/{name}": rows[:, :size] @ turn, f"offset/{name}": rows[:, size]}
    if pair.modality in specification.run_offsets:
        for place, run in enumerate(pair.rows):
            out[f"run_offset/{pair.participant}/{run}/{pair.modality}"] = rows[:, size + 1 + place]
    return out


def _node_sums(
    specification: Specification, layout: NodeLayout, state: State, turn: Array
) -> dict[str, dict[tuple[str, str], Array]]:
    """D, h and differencing weights of all nodes at a draw, factors turned."""
    design = Design.of(specification, layout, state.timescales)
    out: dict[str, dict[tuple[str, str], Array]] = {"precision": {}, "information": {}, "coefficients": {}}
    for modality in design.modalities:
        for run, given in design.statistics(modality, state.rows, state.noise).items():
            out["precision"][run, modality] = turn.T @ given.precision @ turn
            out["information"][run, modality] = given.information @ turn
            if given.coefficients is not None:
                out["coefficients"][run, modality] = given.coefficients
    return out
