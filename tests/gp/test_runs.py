"""msrm.sample_runs: one posterior a group, equal to sampling it alone, restartable, and no group costs another."""

import json
import os
import pickle

import numpy as np
import pytest

import msrm
from msrm.gp import runs as runs_module

OPTIONS = {"chains": 2, "warmup": 8, "draws": 12, "seed": 5, "progress": False}


def recording_of() -> msrm.Recording:
    rng = np.random.default_rng(0)
    times = 1.5 * np.arange(9)
    data = {p: {r: {"rating": (rng.standard_normal((9, 2)), times)} for r in ("run-1", "2 é")} for p in ("p1", "p2")}
    return msrm.Recording.from_dict(data)


def model_of(**settings) -> msrm.GPMSRM:
    return msrm.GPMSRM(1, {"rating": msrm.Identity()}, n_starts=1, tol=1e-2, progress=False, **settings)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return folder, msrm.sample_runs(recording_of(), model_of(), path=folder, n_jobs=2, **OPTIONS)


def test_each_archive_holds_what_sampling_the_run_alone_gives(done):
    folder, result = done
    assert list(result) == ["run-1", "2 é"]
    assert not result.failed
    part = recording_of().select(runs=["2 é"])
    alone = model_of().fit(part)
    again = result["2 é"]
    assert again.tree.attrs["group"] == "2 é"
    draws = alone.sample(part, **OPTIONS | {"seed": again.tree.attrs["seed"]})
    np.testing.assert_array_equal(again.posterior["noise"], draws.posterior["noise"])
    row = result.table.sel(group="2 é")
    assert float(row["ess"]) == pytest.approx(
        min(float(draws.summary().table[key].min()) for key in ("ess_bulk", "ess_tail"))
    )
    assert str(row["verdict"].item()) == draws.summary().verdict
    noise = result.quantities.sel(group="2 é", quantity="noise[p1/rating]")
    assert float(noise["mean"]) == pytest.approx(float(draws.posterior["noise"].sel(stream="p1/rating").mean()))
    assert "NOT CONVERGED" in str(result)
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".json", ".nc", ".nc"]
    with pytest.raises(KeyError, match="no group 'run-9'; there are run-1, 2 é"):
        result["run-9"]


def test_seeds_differ_between_groups_and_finished_archives_are_kept(done):
    folder, result = done
    assert result["run-1"].tree.attrs["seed"] != result["2 é"].tree.attrs["seed"]
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(FileExistsError, match="keep finished groups with resume=True"):
        msrm.sample_runs(recording_of(), model_of(), path=folder, **OPTIONS)
    again = msrm.sample_runs(recording_of(), model_of(), path=folder, resume=True, **OPTIONS)
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    np.testing.assert_array_equal(again.table["ess"], result.table["ess"])
    with pytest.raises(ValueError, match=r"belongs to another run\. Different: sampling\.warmup \(8"):
        msrm.sample_runs(recording_of(), model_of(), path=folder, resume=True, **OPTIONS | {"warmup": 9})
    with pytest.raises(ValueError, match=r"Different: model\.length_scale"):
        msrm.sample_runs(recording_of(), model_of(length_scale=4.0), path=folder, resume=True, **OPTIONS)


def test_more_draws_extend_archives_whose_blocks_were_kept(done, tmp_path):
    folder, whole = done
    with pytest.raises(ValueError, match=r"has 12 draws of a chain, draws=20 are asked, .* keep_blocks=True"):
        msrm.sample_runs(recording_of(), model_of(), path=folder, resume=True, **OPTIONS | {"draws": 20})
    with pytest.raises(ValueError, match=r"has 12 draws of a chain, more than draws=5; ask for at least as many"):
        msrm.sample_runs(recording_of(), model_of(), path=folder, resume=True, **OPTIONS | {"draws": 5})
    how = {"path": tmp_path, "n_jobs": 2, "keep_blocks": True}
    short = msrm.sample_runs(recording_of(), model_of(), **how, **OPTIONS | {"draws": 7})
    assert short["run-1"].posterior.sizes["draw"] == 7
    # The last try of a group failed: it is tried again, and its old archive is not taken for the answer.
    report = tmp_path / "run-1.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {"problem": "OSError: disk full"}))
    longer = msrm.sample_runs(recording_of(), model_of(), **how, resume=True, **OPTIONS)
    assert not longer.failed
    for group in ("run-1", "2 é"):
        np.testing.assert_array_equal(longer[group].posterior["noise"], whole[group].posterior["noise"])
    np.testing.assert_array_equal(longer.table["ess"], whole.table["ess"])
    np.testing.assert_array_equal(longer.quantities["mean"], whole.quantities["mean"])


def test_a_process_is_sent_its_own_part_or_where_it_lies(tmp_path):
    times = np.arange(200.0)
    values = np.random.default_rng(0).standard_normal((200, 300))
    recording = msrm.Recording.from_dict({"p1": {run: {"rating": (values, times)} for run in ("r1", "r2", "r3")}})
    recording.to_netcdf(tmp_path / "recording.nc")
    for source, most in ((recording, 1.1 * values.nbytes), (msrm.open_recording(tmp_path / "recording.nc"), 0.1e6)):
        for part in runs_module._parts(source, "run").values():
            group = runs_module._Group("r", part, model_of(), OPTIONS, tmp_path)
            assert len(pickle.dumps(group)) < most


def test_a_group_that_fails_is_reported_by_name_and_costs_no_other(tmp_path):
    times = 1.5 * np.arange(9)
    data = {"p1": {"good": {"rating": (np.sin(times)[:, None], times)}}}
    data["p1"]["flat"] = {"rating": (np.ones((9, 1)), times)}
    result = msrm.sample_runs(msrm.Recording.from_dict(data), model_of(), path=tmp_path, **OPTIONS)
    assert list(result.failed) == ["flat"]
    assert "none of its 1 features varies" in result.failed["flat"]
    assert list(result) == ["good"]
    with pytest.raises(ValueError, match="flat failed"):
        result["flat"]


class Crashing(msrm.GPMSRM):
    """Ends its process where the recording has participant p2 only."""

    def fit(self, recording):
        if recording.participants == ("p2",):
            os._exit(9)
        return super().fit(recording)


def test_by_participant_and_a_process_that_dies(tmp_path):
    estimator = Crashing(1, {"rating": msrm.Identity()}, n_starts=1, tol=1e-2, progress=False)
    result = msrm.sample_runs(recording_of(), estimator, path=tmp_path, by="participant", **OPTIONS)
    assert result.failed == {"p2": "its process ended with exit code 9"}
    assert list(result) == ["p1"]


def test_groups_by_fold_and_devices_seen_by_a_process(monkeypatch):
    parts = runs_module._parts(recording_of(), "fold")
    assert {name: part.runs for name, part in parts.items()} == {
        "without run-1": ("2 é",),
        "without 2 é": ("run-1",),
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with runs_module._visible("1"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    with pytest.raises(ValueError, match="by must be one of 'run', 'participant', 'fold', found 'day'"):
        msrm.sample_runs(recording_of(), model_of(), path="x", by="day")
    with pytest.raises(ValueError, match="sampler must be one of 'gibbs', 'nuts', found 'hmc'"):
        msrm.sample_runs(recording_of(), model_of(), path="x", sampler="hmc")
    with pytest.raises(ValueError, match="chains must be an integer of at least 1, found 0"):
        msrm.sample_runs(recording_of(), model_of(), path="x", chains=0)
    with pytest.raises(TypeError, match="metric"):
        msrm.sample_runs(recording_of(), model_of(), path="x", metric="dense")
    assert not os.path.exists("x")
    with pytest.raises(TypeError, match="sample_runs takes a GPMSRM, got RMSRM"):
        msrm.sample_runs(recording_of(), msrm.RMSRM(responses={"rating": msrm.Identity()}), path="x")
    with pytest.raises(ValueError, match="by='fold' leaves out one run in turn and needs at least 2, found run-1"):
        msrm.sample_runs(recording_of().select(runs=["run-1"]), model_of(), path="x", by="fold")
    monkeypatch.setattr(runs_module, "visible_gpus", list)
    for unfit in (0, "01", ["0"], [0.5], [True], np.array([0])):
        with pytest.raises(TypeError, match=r"devices takes a list of numbers of cards, such as \[0, 1\], found"):
            msrm.sample_runs(recording_of(), model_of(), path="x", devices=unfit)
    with pytest.raises(ValueError, match=r"devices=\[0, 0\] names a card twice"):
        msrm.sample_runs(recording_of(), model_of(), path="x", devices=[0, 0])
    with pytest.raises(RuntimeError, match=r"devices=\[0\]: no NVIDIA card is visible"):
        msrm.sample_runs(recording_of(), model_of(), path="x", devices=[0])
    monkeypatch.setattr(runs_module, "visible_gpus", lambda: ["a card"] * 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")
    assert runs_module._cards([1, 0]) == ["3", "2"]  # counted among those that were given
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert runs_module._cards([1, 3]) == ["1", "3"]
    monkeypatch.setattr(runs_module, "visible_gpus", lambda: ["one card"])
    for devices in ([], [1]):
        with pytest.raises(ValueError, match="devices must be some of 0 to 0"):
            msrm.sample_runs(recording_of(), model_of(), path="x", devices=devices)
