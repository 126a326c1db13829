"""Leave-one-block-out: how well draws predict a participant's modality in a run from all other blocks (DESIGN 5).

The latent-marginal likelihood does not factor over blocks, so the pointwise density is ``p(block | other blocks,
parameters)``, exact at each draw (:mod:`msrm.gp.left_out`). Averaged over the posterior without the block, which draws
with weights ``1 / share(block)`` stand for, Pareto-smoothed (:mod:`msrm.gp.psis`):

    elpd(block) = log sum_s w_s p(block | others, theta_s)

The share is that density too, unless the modality has a power: densities are those of the data under the noise as it
is, whatever powers the posterior raised likelihoods to.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy.special import logsumexp

from msrm.gp.backends import select_likelihood
from msrm.gp.data import NodeLayout
from msrm.gp.fitted import starting_length_scale
from msrm.gp.gibbs.chains import light_layout
from msrm.gp.gibbs.start import state_of
from msrm.gp.gibbs.state import State
from msrm.gp.left_out import Block, LeftOut
from msrm.gp.likelihood import Likelihood
from msrm.gp.prediction import check_stream
from msrm.gp.psis import good_k, smoothed
from msrm.gp.statespace import StateSpace
from msrm.nodes import usable_rows
from msrm.recording import Recording
from msrm.runtime.workers import parallel_map, worker_count

if TYPE_CHECKING:
    from msrm.gp.draws import Draws

__all__ = ["Loo", "held_out_densities", "leave_one_out", "members_left_out", "states_at"]

Array = NDArray[np.float64]
_TOGETHER = 10  # draws a job: their functionals are kept while responses stay


@dataclass(frozen=True, eq=False)
class Loo:
    """Leave-one-block-out cross-validation.

    Attributes
    ----------
    elpd, se : float
        Sum of the log predictive densities of the blocks, nats, and its standard error.
    p : float
        Effective number of parameters: how much better the blocks are predicted when they are seen.
    pointwise : Dataset
        By ``block``: ``elpd``, ``p``, ``k_hat``.
    log_likelihood : DataArray (chain, draw, block)
        ``log p(block | other blocks)`` at each draw used.
    log_share : DataArray (chain, draw, block)
        What the block is in the posterior: the same, unless its modality has a power.
    verdict : str
    """

    elpd: float
    se: float
    p: float
    pointwise: xr.Dataset
    log_likelihood: xr.DataArray
    log_share: xr.DataArray
    verdict: str

    @property
    def tree(self) -> xr.DataTree:
        """For ArviZ: ``arviz.loo(tree)``, and ``arviz.compare({name: loo.tree, ...})`` of models of the same data.

        Raises
        ------
        ValueError
            For a model with powers, whose draws ArviZ would weight by densities that the posterior does not have.
        """
        if not self.log_share.equals(self.log_likelihood):
            raise ValueError(
                "The model has powers: arviz.loo would weight draws by the densities of the data, which the posterior "
                "has raised to the powers. Compare models by loo.pointwise['elpd'], which has the right weights."
            )
        likelihood = self.log_likelihood.rename("given_others").to_dataset()
        told = self.log_likelihood.sum("block").rename("log_likelihood_of_blocks")
        return xr.DataTree.from_dict({"posterior": told.to_dataset(), "log_likelihood": likelihood})

    def __str__(self) -> str:
        return f"elpd {self.elpd:.1f}, se {self.se:.1f}, p {self.p:.1f}\n{self.verdict}"


def leave_one_out(
    draws: "Draws", recording: Recording, *, size: int, n_jobs: int = -1, progress: bool | None = None
) -> Loo:
    """See :meth:`msrm.gp.draws.Draws.loo`."""
    ready = draws.with_recording(recording)
    likelihood, _ = draws.model.prepared(recording, reduce=True, standardization=draws.model.model_.standardization)
    left_out = LeftOut.of(likelihood.specification, light_layout(likelihood.nodes), backend_of(ready, likelihood))
    n_chains, n_draws = draws.turns.shape[:2]
    thin = max(1, -(-n_chains * n_draws // size))
    kept = np.arange(0, n_draws, thin)
    places = [(chain, int(draw)) for chain in range(n_chains) for draw in kept]
    states = states_at(draws, likelihood.nodes, places)
    jobs = [(states[start : start + _TOGETHER],) for start in range(0, len(states), _TOGETHER)]
    workers = worker_count(n_jobs, len(jobs))
    found = parallel_map(_densities, jobs, n_jobs=workers, shared=(left_out,), desc="loo", progress=progress)
    # (density and share, chain, draw, block)
    values = np.stack([np.concatenate(part) for part in zip(*found, strict=True)])
    values = values.reshape(2, n_chains, len(kept), -1)
    if not np.isfinite(values).all():
        raise FloatingPointError("a posterior precision without one block could not be factored; see draws.summary()")
    return _judged(values + _units(draws, recording, left_out.blocks), kept, left_out.blocks)


def _densities(left_out: LeftOut, states: list[State]) -> tuple[Array, Array]:
    density, share = zip(*(left_out.given_others(state) for state in states), strict=True)
    return np.array(density), np.array(share)


def _judged(values: Array, kept: NDArray[np.intp], blocks: list[Block]) -> Loo:
    flat, shares = values.reshape(2, -1, len(blocks))
    elpd, k_hat = np.empty(len(blocks)), np.empty(len(blocks))
    for place, (column, share) in enumerate(zip(flat.T, shares.T, strict=True)):
        weights, k_hat[place] = smoothed(-share)
        elpd[place] = logsumexp(weights + column)
    seen = logsumexp(flat, axis=0) - np.log(len(flat))
    coords = block_coords(blocks)
    pointwise = xr.Dataset({n: ("block", v) for n, v in (("elpd", elpd), ("p", seen - elpd), ("k_hat", k_hat))}, coords)
    axes, dims = {"chain": np.arange(values.shape[1]), "draw": kept, **coords}, ("chain", "draw", "block")
    density, share = (
        xr.DataArray(part, axes, dims, name) for part, name in zip(values, ("log_likelihood", "log_share"), strict=True)
    )
    limit = good_k(len(flat))
    bad = k_hat > limit
    verdict = f"All {len(blocks)} k-hat are at most {limit:.2f}: the estimate is reliable."
    if bad.any():
        worst = "/".join(blocks[int(np.argmax(k_hat))])
        verdict = (
            f"k-hat exceeds {limit:.2f} for {bad.sum()} of {len(blocks)} blocks (up to {k_hat.max():.2f}, {worst}): "
            "the posterior without such a block is far from the one with it, and its elpd is too high. Score it by "
            "refitting: msrm.evaluate with msrm.SampledGPMSRM."
        )
    se = float(np.sqrt(len(elpd) * np.var(elpd, ddof=1))) if len(elpd) > 1 else np.nan
    return Loo(float(elpd.sum()), se, float((seen - elpd).sum()), pointwise, density, share, verdict)


def block_coords(blocks: Iterable[Block]) -> dict[str, Any]:
    """Coordinates of the dimension ``block``: participant/run/modality, and each of the three."""
    rows = list(blocks)
    columns = {"participant": 0, "modality": 1, "run": 2}
    return {"block": [f"{p}/{run}/{m}" for p, m, run in rows]} | {
        name: ("block", [row[i] for row in rows]) for name, i in columns.items()
    }


def held_out_densities(draws: "Draws", recording: Recording) -> xr.Dataset:
    """See :meth:`msrm.gp.draws.Draws.log_predictive_density`."""
    left_out, states = members_left_out(draws, recording)
    values = np.array([left_out.given_others(state)[0] for state in states])
    weights = draws.ensemble.weights
    share = np.full(len(values), 1.0 / len(values)) if weights is None else weights
    total = logsumexp(values, axis=0, b=share[:, None]) + _units(draws, recording, left_out.blocks)
    rows = [
        int(recording.stream(p, run, m).summary.row_observed.sum()) for p, m, run in left_out.blocks
    ]  # finite entries
    return xr.Dataset({"log_density": ("block", total), "entries": ("block", rows)}, block_coords(left_out.blocks))


def _units(draws: "Draws", recording: Recording, blocks: Iterable[Block]) -> Array:
    """What turns densities of standardized entries into those of the data, nats (block,)."""
    fitted = draws.model.model_
    rows = list(blocks)
    if not fitted.standardization:
        return np.zeros(len(rows))
    usable = usable_rows(recording, fitted.specification.responses, edges=fitted.edges)
    out = []
    for participant, modality, run in rows:
        values = recording.stream(participant, run, modality).values[usable.rows[participant, run, modality]]
        entries = np.isfinite(values).sum(axis=0)
        logs = np.log(
            fitted.standardization[participant, modality].scale, where=entries > 0, out=np.zeros(len(entries))
        )
        out.append(-float(entries @ logs))
    return np.array(out)


def members_left_out(draws: "Draws", recording: Recording) -> tuple[LeftOut, list[State]]:
    """Block densities of other recordings of fitted participants, and the ensemble's members as states there.

    Raises
    ------
    ValueError
        For streams that the fit does not know, and for models with run offsets, which new runs do not have yet.
    """
    fitted = draws.model.model_
    for stream in recording.streams():
        check_stream(fitted, stream)
    if fitted.specification.run_offsets:
        raise ValueError(
            "New runs have run offsets of their own, which these densities would have to integrate out: not available "
            "with run_offsets. Use msrm.score, or update(new, training=...)."
        )
    likelihood, _ = draws.model.prepared(recording, reduce=False, standardization=fitted.standardization)
    specification, layout = likelihood.specification, likelihood.nodes
    left_out = LeftOut.of(specification, layout, backend_of(draws, likelihood))
    return left_out, [state_of(specification, layout, member.parameters) for member in draws.ensemble]


def backend_of(draws: "Draws", likelihood: Likelihood) -> StateSpace:
    """The grid that draws were made on, for a recording's nodes."""
    chosen = select_likelihood(
        "statespace",
        likelihood.nodes.groups,
        likelihood.specification.n_factors,
        matern=likelihood.specification.matern,
        length_scale=starting_length_scale(likelihood.specification),
        length_scale_slope=False,
    ).backend
    assert isinstance(chosen, StateSpace)
    attrs = draws.tree.attrs
    finer = chosen.at_step(float(attrs["step"]))
    identity, filtered = finer.off_grid
    return finer.with_residual(identity | (frozenset(attrs["residual"]) & filtered))


def states_at(draws: "Draws", layout: NodeLayout, places: list[tuple[int, int]]) -> list[State]:
    """Chain states (rotated coordinates, null rows included) of some draws (chain, draw)."""
    specification, posterior = draws.model.model_.specification, draws.posterior
    base = state_of(specification, layout, draws.model.model_.parameters)
    noise = posterior["noise"].values
    scalars = _scalars(posterior)
    out = []
    for chain, draw in places:
        rows = {key: rows[chain, draw] for key, rows in draws.rows.items()}
        variances = dict(zip(draws.rows, noise[chain, draw].tolist(), strict=True))
        state = replace(base, rows=rows, noise=variances)
        for name, values in scalars.items():
            state = state.with_parameter(name, float(values[chain, draw]))
        out.append(state)
    return out


def _scalars(posterior: xr.Dataset) -> dict[str, Array]:
    """Sampled scalars (chain, draw) by their parameter names."""
    out = {}
    if "response" in posterior:
        for place, name in enumerate(posterior["parameter"].values):
            out[f"response/{name}"] = posterior["response"].values[..., place]
    if "length_scale" in posterior:
        out["length_scale"] = posterior["length_scale"].values
    if "residual_timescale" in posterior:
        for place, name in enumerate(posterior["modality_name"].values):
            out[f"residual_timescale/{name}"] = posterior["residual_timescale"].values[..., place]
    return out
