"""Recordings small enough for NUTS in a test, and what its draws and the Gibbs sampler's are compared on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import xarray as xr
from scipy import stats

import msrm
from msrm.gp.nuts.chains import _Chain


@contextmanager
def interrupted_after(steps: int) -> Iterator[None]:
    """Ctrl-C once all chains of the block together have made so many steps."""
    taken, left = _Chain.take, steps

    def take(chain: _Chain, state: Any) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        taken(chain, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Chain, "take", take)
        yield


def tiny(*, n_factors: int = 1, missing: float = 0.0, runs: int = 1, likelihood: str = "statespace") -> Any:
    """A recording made by a model, wide enough for null rows, and its fit."""
    rng, data = np.random.default_rng(5), {}
    for p in ("p1", "p2"):
        loading = {"brain": rng.standard_normal((n_factors, 9)), "rating": rng.standard_normal((n_factors, 3))}
        for run in range(runs):
            phase = 0.7 * run
            streams = {}
            for name, times in {"brain": 1.8 * np.arange(7), "rating": 1.2 * np.arange(10)}.items():
                seen = times - (0.3 if name == "rating" else 0.0)
                path = np.stack([np.sin(seen / (1.5 + k) + k + phase) for k in range(n_factors)], axis=1) * 1.4
                values = path @ loading[name] + 0.5 * rng.standard_normal((len(times), loading[name].shape[1]))
                if missing:
                    gone = rng.uniform(size=values.shape) < missing
                    gone[:, 0] = False
                    values[gone] = np.nan
                streams[name] = (values, times)
            data.setdefault(p, {})[f"run-{run + 1}"] = streams
    recording = msrm.Recording.from_dict(data)
    lag = msrm.Free(0.2, bounds=(-1.0, 1.0), prior=msrm.Normal(0.0, 0.5))
    width = msrm.Free(0.6, bounds=(0.3, 1.2), prior=msrm.LogNormal(-0.5, 0.3))
    responses = {"brain": msrm.Identity(), "rating": msrm.Gaussian(width=width, lag=lag)}
    priors = msrm.Priors(noise=msrm.LogNormal(-1.0, 0.7))
    gp = msrm.GPMSRM(n_factors, responses, length_scale=2.5, priors=priors, likelihood=likelihood, n_starts=1)
    return gp.fit(recording), recording


def invariants(draws: msrm.Draws) -> xr.Dataset:
    """The posterior group, and entries of W W' within and across streams of the coordinates with data."""
    size = draws.n_factors
    rows = np.concatenate(
        [value[:, :, : draws.pairs[key].n_coordinates, :size] for key, value in draws.rows.items()], axis=2
    )[:, :, ::5]
    products = np.einsum("cdik,cdjk->cdij", rows, rows)
    lower = np.tril_indices(rows.shape[2])
    return draws.posterior.assign(product=(("chain", "draw", "entry"), products[:, :, *lower]))


def check_agreement(one: msrm.Draws, other: msrm.Draws, level: float = 1e-3) -> None:
    """Means and sds of all invariants within Monte Carlo error, at a family-wise level."""
    a, b = msrm.diagnostics.summary(invariants(one)).table, msrm.diagnostics.summary(invariants(other)).table
    assert float(a.ess_bulk.min()) > 40
    assert float(b.ess_bulk.min()) > 40
    limit = float(stats.norm.isf(0.5 * level / (2 * a.sizes["quantity"])))
    for name in ("mean", "sd"):
        z = np.abs(a[name] - b[name]) / np.hypot(a[f"mcse_{name}"], b[f"mcse_{name}"])
        assert float(z.max()) < limit, (name, str(z.quantity.values[int(z.argmax())]), float(z.max()))
