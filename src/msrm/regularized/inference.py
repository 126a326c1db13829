"""Latent paths of new data at fitted parameters, and where data support them.

The latents minimize the training objective with the new streams in the training streams' place: an entry keeps the
weight that its stream has in training, the penalty keeps its own, and a stream that is left out is a term that is
missing. So the training recording gives back the training latents, and runs do not depend on each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msrm.coverage import Interval, inside, merged, seen
from msrm.regularized.domain import Grid, cell_weights
from msrm.regularized.latents import PathSystem
from msrm.regularized.model import Model, PairModel
from msrm.regularized.problem import key_of, rows_and_grids
from msrm.responses import Identity, Response, hat_rows
from msrm.rotation import feature_blocks
from msrm.stream import Stream
from msrm.temporal_rows import TemporalRows

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class RowTerms:
    """What a stream's rows say about the latent: sum_n g_n'D_n g_n - 2 h_n'g_n, before the weight of the row.

    Attributes
    ----------
    count : (time,) int
        Finite entries over features that took part in training.
    precision : (time, K, K)
        Mean of w w' over a row's finite entries.
    information : (time, K)
        Mean of y w.
    """

    count: NDArray[np.int64]
    precision: Array
    information: Array


@dataclass(frozen=True)
class InferredRun:
    """The latent paths of one run.

    Attributes
    ----------
    participants : tuple of str
        Owners of the paths, empty for a shared one.
    grid : Grid
    paths : (time, path, K)
    covered : dict from path to list of (start, stop)
        Stretches of latent time seen by data, seconds, disjoint and increasing.
    """

    participants: tuple[str, ...]
    grid: Grid
    paths: Array
    covered: tuple[tuple[Interval, ...], ...]

    def path_of(self, participant: str) -> int:
        """Which path a participant's streams see."""
        return self.participants.index(participant) if self.participants else 0

    def at(self, times: Array) -> Array:
        """Paths (time, path, K) at other times, NaN outside the grid."""
        within = inside(times, Identity(), ((self.grid.start, self.grid.last),))
        place = np.clip((times - self.grid.start) / self.grid.step, 0, self.grid.count - 1)
        left = np.minimum(place.astype(np.intp), self.grid.count - 2)
        share = (place - left)[:, None, None]
        values = (1 - share) * self.paths[left] + share * self.paths[left + 1]
        return np.where(within[:, None, None], values, np.nan)

    def supported(self, times: Array, response: Response, path: int) -> Mask:
        """Times whose response's support lies inside one covered stretch of the path."""
        return inside(times, response, self.covered[path])

    def response_values(self, times: Array, response: Response, path: int) -> Array:
        """The latent through a response (time, K) at any times; NaN where its support leaves the grid."""
        grid = self.grid
        within = inside(times, response, ((grid.start, grid.last),))
        out = np.full((len(times), self.paths.shape[2]), np.nan)
        if within.any():
            rows, _ = hat_rows(response, None, times[within], grid.start, grid.step, grid.count)
            out[within] = rows.apply(self.paths[:, path])
        return out


def row_terms(stream: Stream, pair: PairModel) -> RowTerms:
    """One pass over a stream's values, in feature blocks."""
    size = pair.loading.shape[1]
    count = np.zeros(stream.n_times, np.int64)
    precision, information = np.zeros((stream.n_times, size, size)), np.zeros((stream.n_times, size))
    present = pair.present
    for span, (values,) in feature_blocks([stream]):
        own = present[span]
        loading = pair.loading[span][own]
        data = (values[:, own] - pair.mean[span][own]) / pair.sd[span][own]
        finite = np.isfinite(data)
        count += finite.sum(1)
        if finite.all():
            precision += loading.T @ loading
        else:
            products = np.einsum("fk,fl->fkl", loading, loading).reshape(len(loading), -1)
            precision += (finite @ products).reshape(precision.shape)
            data = np.where(finite, data, 0.0)
        information += data @ loading
    safe = np.maximum(count, 1)
    return RowTerms(count, precision / safe[:, None, None], information / safe[:, None])


def infer_run(
    model: Model, streams: Sequence[Stream], terms: Sequence[RowTerms], also: Sequence[str] = ()
) -> InferredRun | None:
    """The latent paths of one run from some of its streams.

    Parameters
    ----------
    streams : sequence of Stream
        Of one run.
    terms : sequence of RowTerms
    also : sequence of str
        Participants without a stream here who get a path under population pooling.

    Returns
    -------
    InferredRun, or None when no row of any stream is usable.
    """
    settings = model.settings
    known = [(s, t) for s, t in zip(streams, terms, strict=True) if t.count.any()]
    if not known:
        return None
    observed = {key_of(s): t.count > 0 for s, t in known}
    rows, grids, _ = rows_and_grids([s for s, _ in known], observed, settings)
    used = [(s, t, rows[key_of(s)]) for s, t in known if rows[key_of(s)].any()]
    if not used:
        return None
    run, grid = used[0][0].run, grids[used[0][0].run]
    participants: tuple[str, ...] = ()
    if settings.latent_pooling != "shared":
        participants = tuple(dict.fromkeys([*(s.participant for s, _, _ in used), *also]))
    coupling = settings.population_strength if settings.latent_pooling == "population" else 0.0
    system = PathSystem(
        run, participants, grid, model.system_weight, settings.latent_ridge, settings.roughness, coupling
    )
    bands, covered = [], [[] for _ in range(system.n_paths)]  # type: ignore[var-annotated]
    right = np.zeros((grid.count, system.n_paths, settings.n_factors))
    for stream, term, keep in used:
        path, response = system.path_of(stream.participant), model.pairs[stream.participant, stream.modality].response
        times = stream.times[keep]
        operator, _ = hat_rows(response, None, times, grid.start, grid.step, grid.count)
        weight = model.factor(key_of(stream)) * cell_weights(times)
        right[:, path] += operator.adjoint(weight[:, None] * term.information[keep])
        bands += [(path, *band) for band in _bands(operator, weight, term.precision[keep])]
        # Population paths are drawn to their mean, so one participant's data support the paths of all.
        for own in covered if settings.latent_pooling == "population" else (covered[path],):
            own += seen(times, response)
    return InferredRun(participants, grid, system.solve(bands, right), tuple(merged(own) for own in covered))


def _bands(operator: TemporalRows, weight: Array, precision: Array) -> list[tuple[Array, Array]]:
    """Temporal bands and the factor matrices they multiply: one where rows differ by weight only, else one a pair."""
    if (precision == precision[0]).all():
        return [(operator.gram(weight), precision[0])]
    size = precision.shape[1]
    i, j = np.triu_indices(size)
    grams = operator.gram(weight[:, None] * precision[:, i, j])
    matrices = np.zeros((len(i), size, size))
    matrices[np.arange(len(i)), i, j] = matrices[np.arange(len(i)), j, i] = 1.0
    return [(grams[:, :, index], matrix) for index, matrix in enumerate(matrices)]
