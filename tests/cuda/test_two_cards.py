"""Two cards, one process each: posteriors of two runs side by side, each the same as on one card alone."""

import numpy as np
import pytest
from conftest import REHEARSAL

import msrm
from msrm.archive import read_tree
from msrm.gp import runs as runs_module
from msrm.runtime.warn import visible_gpus

pytestmark = pytest.mark.cuda

OPTIONS = {"chains": 2, "warmup": 20, "draws": 20, "progress": False}


def environment_of(archive):
    """Variables that the process of an archive saw."""
    return read_tree(archive)["runtime"].attrs["environment"]


@pytest.mark.timeout(900)
def test_runs_are_sampled_on_a_card_each(tmp_path, monkeypatch):
    if REHEARSAL:
        monkeypatch.setattr(runs_module, "visible_gpus", lambda: ["a card", "another"])
    elif len(visible_gpus()) < 2:
        pytest.skip("fewer than two NVIDIA cards are visible")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    recording, _ = msrm.simulate(features=6, seconds=60.0, factors=1, runs=2)
    lag = msrm.Free(0.2, bounds=(-1.5, 1.5), prior=msrm.Normal(0.3, 0.5))
    responses = {name: msrm.Identity() for name in recording.modalities} | {"rating": msrm.Gaussian(width=0.6, lag=lag)}
    device = "cpu" if REHEARSAL else "cuda"
    model = msrm.GPMSRM(1, responses, likelihood="statespace", device=device, n_starts=1, progress=False)
    both = msrm.sample_runs(recording, model, path=tmp_path / "both", devices=[0, 1], **OPTIONS)
    assert not both.failed
    seen = {run: environment_of(tmp_path / "both" / f"{run}.nc")["CUDA_VISIBLE_DEVICES"] for run in both}
    assert sorted(seen.values()) == ["0", "1"]
    last = list(both)[-1]
    alone = msrm.sample_runs(recording.select(runs=[last]), model, path=tmp_path / "alone", devices=[0], **OPTIONS)
    assert not alone.failed
    for name in ("noise", "response", "log_likelihood_marginal"):
        np.testing.assert_array_equal(both[last].posterior[name], alone[last].posterior[name])
