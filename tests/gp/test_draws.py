"""msrm.gp storage of draws: blocks survive kills and full disks, resume is bit-identical or refused with the reason."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import arviz_stats
import numpy as np
import pytest

import msrm
from msrm.gp import GPMSRM
from msrm.gp.gibbs import chains as chains_module
from msrm.gp.gibbs.sweep import Sweeper
from msrm.gp.sampling import sample
from msrm.gp.storage import DrawStore, generator_from_state, generator_state

IDENTITY = {"data": "aa11", "settings": {"seed": 0, "warmup": 10}, "versions": {"numpy": "2"}, "device": "cpu"}


def walk(state: dict, store, n_draws: int, block: int, pause: float = 0.0) -> None:
    """A chain in the manner of the samplers: a random walk that flushes `block` draws at a time."""
    last = store.last()
    done = last.draws if last else 0
    position = (last.state if last else state)["position"].copy()
    rng = generator_from_state((last.state if last else state)["rng"])
    while done < n_draws:
        count = min(block, n_draws - done)
        draws = np.empty((count, 3))
        for i in range(count):
            position += rng.standard_normal(3)
            draws[i] = position
            time.sleep(pause)
        store.append(done, 10, {"x": draws}, {"position": position, "rng": generator_state(rng)})
        done += count


def start() -> dict:
    return {"position": np.zeros(3), "rng": generator_state(np.random.default_rng(3))}


def test_generator_state_round_trip():
    rng = np.random.default_rng(9)
    rng.standard_normal(3)
    rng.integers(0, 10, dtype=np.uint32)
    twin = generator_from_state(generator_state(rng))
    assert rng.integers(0, 1 << 30, dtype=np.uint32) == twin.integers(0, 1 << 30, dtype=np.uint32)
    np.testing.assert_array_equal(rng.standard_normal(5), twin.standard_normal(5))
    with pytest.raises(TypeError, match="only PCG64"):
        generator_state(np.random.Generator(np.random.MT19937(0)))


def test_blocks_of_any_size_hold_the_same_chain(tmp_path):
    reads = []
    for block in (1, 7, 100):
        store = DrawStore.create(tmp_path / str(block), IDENTITY).chain(0)
        walk(start(), store, 50, block)
        reads.append(store.read()["x"])
    np.testing.assert_array_equal(reads[0], reads[1])
    np.testing.assert_array_equal(reads[0], reads[2])
    assert store.read(["absent"]) == {}


def test_a_checkpoint_of_the_warmup_is_replaced_and_then_superseded(tmp_path):
    chain = DrawStore.create(tmp_path / "d", IDENTITY).chain(0)
    assert chain.last() is None
    chain.checkpoint(5, start())
    chain.checkpoint(8, start())
    assert (chain.last().warmup, chain.last().draws) == (8, 0)
    walk(start(), chain, 4, 2)
    assert (chain.last().warmup, chain.last().draws) == (10, 4)


KILLED = """
    import sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from test_draws import IDENTITY, start, walk
    from msrm.gp.storage import DrawStore
    store = DrawStore.resume(Path({folder!r}), IDENTITY)
    print("ready", flush=True)
    walk(start(), store.chain(0), 300, 10, pause=0.002)
"""


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is a POSIX signal")
def test_kill_9_loses_at_most_the_open_block_and_resume_is_bit_identical(tmp_path):
    whole = DrawStore.create(tmp_path / "whole", IDENTITY).chain(0)
    walk(start(), whole, 300, 10)
    folder = tmp_path / "killed"
    script = textwrap.dedent(KILLED.format(tests=os.path.dirname(__file__), folder=str(folder)))
    previous = 0
    for delay in (0.05, 0.11, 0.173):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=30)
        child.stdout.close()
        last = DrawStore.resume(folder, IDENTITY).chain(0).last()
        done = last.draws if last else 0
        assert done % 10 == 0
        assert done >= previous
        previous = done
    assert 0 < previous < 300
    chain = DrawStore.resume(folder, IDENTITY).chain(0)
    walk(start(), chain, 300, 10)
    np.testing.assert_array_equal(chain.read()["x"], whole.read()["x"])


LIMITED = """
    import resource, signal, sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    import numpy as np
    from test_draws import IDENTITY, start
    from msrm.gp.storage import DrawStore
    chain = DrawStore.create(Path({folder!r}), IDENTITY).chain(0)
    chain.append(0, 10, {{"x": np.ones((5, 3))}}, start())
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        chain.append(5, 10, {{"x": np.ones((5000, 3))}}, start())
    except OSError as error:
        print(error)
"""


@pytest.mark.skipif(os.name != "posix", reason="file size limits are POSIX")
def test_a_full_disk_stops_cleanly_and_keeps_every_earlier_block(tmp_path):
    folder = tmp_path / "full"
    script = textwrap.dedent(LIMITED.format(tests=os.path.dirname(__file__), folder=str(folder)))
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "cannot write draws-000000005.npz of chain-00" in out
    assert "resume=True" in out
    assert [path.name for path in (folder / "chain-00").iterdir()] == ["draws-000000000.npz"]
    assert DrawStore.resume(folder, IDENTITY).chain(0).last().draws == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": "bb22"}, r"data \(aa11 on disk, bb22 now\)"),
        ({"settings": {"seed": 1, "warmup": 10}}, r"settings\.seed \(0 on disk, 1 now\)"),
        ({"settings": {"seed": 0}}, r"settings\.warmup \(10 on disk, nothing now\)"),
        ({"versions": {"numpy": "3"}}, r"versions\.numpy \(2 on disk, 3 now\)"),
        ({"device": "gpu"}, r"device \(cpu on disk, gpu now\)"),
    ],
)
def test_resuming_another_run_is_refused_and_says_which_part_differs(tmp_path, change, words):
    DrawStore.create(tmp_path / "d", IDENTITY)
    with pytest.raises(ValueError, match=words):
        DrawStore.resume(tmp_path / "d", IDENTITY | change)


def test_a_new_run_never_overwrites_an_earlier_one(tmp_path):
    DrawStore.create(tmp_path / "d", IDENTITY)
    with pytest.raises(FileExistsError, match="resume=True"):
        DrawStore.create(tmp_path / "d", IDENTITY)


def test_blocks_without_a_sound_identity_are_refused(tmp_path):
    store = DrawStore.create(tmp_path / "d", IDENTITY)
    walk(start(), store.chain(0), 3, 3)
    record = tmp_path / "d" / "identity.json"
    content = record.read_text()
    record.write_text(content[:-20])
    with pytest.raises(ValueError, match=r"identity\.json: damaged"):
        DrawStore.resume(tmp_path / "d", IDENTITY)
    record.unlink()  # of other data, for all that anybody knows
    with pytest.raises(ValueError, match=r"but not identity\.json"):
        DrawStore.resume(tmp_path / "d", IDENTITY)


def test_damaged_and_missing_blocks_are_refused_by_name(tmp_path):
    chain = DrawStore.create(tmp_path / "d", IDENTITY).chain(0)
    walk(start(), chain, 9, 3)
    middle = chain.folder / "draws-000000003.npz"
    content = bytearray(middle.read_bytes())
    place = content.find(np.ascontiguousarray(chain.read()["x"][3:6]).tobytes())
    content[place + 5] ^= 1
    middle.write_bytes(content)
    with pytest.raises(ValueError, match=r"draws-000000003\.npz: damaged"):
        chain.read()
    middle.write_bytes(content[:100])
    with pytest.raises(ValueError, match=r"draws-000000003\.npz: damaged"):
        chain.last()
    middle.unlink()
    with pytest.raises(ValueError, match="draws 3 to 5 are missing"):
        chain.last()


def test_remove_leaves_nothing(tmp_path):
    store = DrawStore.create(tmp_path / "d", IDENTITY)
    walk(start(), store.chain(0), 4, 2)
    store.remove()
    assert list(tmp_path.iterdir()) == []


# The sampler from end to end


def small_recording() -> msrm.Recording:
    """Two participants, a stream with more features than rows and a filtered one."""
    rng = np.random.default_rng(0)
    slow, fast = 1.8 * np.arange(9), 1.2 * np.arange(12)

    def seen(times: np.ndarray, features: int) -> np.ndarray:
        path = np.stack([np.sin(times / 2.5), np.cos(times / 3.7)], axis=1)
        return path @ rng.standard_normal((2, features)) + 0.5 * rng.standard_normal((len(times), features))

    return msrm.Recording.from_dict(
        {p: {"run-1": {"brain": (seen(slow, 14), slow), "rating": (seen(fast, 3), fast)}} for p in ("p1", "p2")}
    )


@pytest.fixture(scope="module")
def fitted() -> tuple[GPMSRM, msrm.Recording]:
    recording = small_recording()
    lag = msrm.Free(0.2, bounds=(-1.0, 1.0), prior=msrm.Normal(0.0, 0.5))
    model = GPMSRM(2, {"brain": msrm.Identity(), "rating": msrm.Gaussian(width=0.6, lag=lag)}, n_starts=1)
    return model.fit(recording), recording


@pytest.fixture(scope="module")
def draws(fitted):
    return sample(*fitted, chains=2, warmup=40, draws=30, seed=1, progress=False)


def test_the_tree_is_usable_by_arviz(draws):
    posterior = draws.tree["posterior"].to_dataset()
    assert posterior["noise"].dims == ("chain", "draw", "stream")
    assert posterior["offset"].sizes["channel"] == 34
    assert list(posterior["parameter"].values) == ["rating/lag"]
    assert np.isfinite(posterior["log_likelihood_marginal"]).all()
    theirs = arviz_stats.ess(draws.tree, method="bulk")["noise"].values
    table = draws.summary().table
    ours = [float(table.ess_bulk.sel(quantity=f"noise[{name}]")) for name in posterior["stream"].values]
    np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    stacked = arviz_stats.summary(draws.tree)  # all variables together, as a user's first call
    assert len(stacked) == table.sizes["quantity"]
    assert list(draws.tree["constant_data"]["participant"].values) == ["p1"] * 17 + ["p2"] * 17


def test_loadings_offsets_and_norms_on_demand_are_those_of_the_tree(draws):
    posterior = draws.tree["posterior"].to_dataset()
    labels = draws.tree["constant_data"].to_dataset()
    mine = (labels["participant"] == "p2") & (labels["modality"] == "brain")
    for aligned in (True, False):
        loading = draws.loading("p2", "brain", aligned=aligned)
        np.testing.assert_allclose((loading**2).sum("factor"), posterior["loading_norm2"][..., mine.values], rtol=1e-9)
    np.testing.assert_allclose(draws.offset("p2", "brain"), posterior["offset"][..., mine.values], rtol=1e-9)
    some = draws.loading("p2", "brain", features=["3", "0"], thin=10)
    np.testing.assert_array_equal(some, draws.loading("p2", "brain").sel(feature=["3", "0"])[:, ::10])
    with pytest.raises(ValueError, match="has no feature 'x'"):
        draws.loading("p2", "brain", features=["x"])
    with pytest.raises(ValueError, match="p3/brain is not in the draws"):
        draws.loading("p3", "brain")


def test_predictions_are_mixtures_over_members(draws, fitted):
    _, recording = fitted
    predicted = draws.predict(recording, targets={"p1": ["rating"]})["p1/run-1/rating"].to_dataset()
    members = [
        msrm.gp.prediction.predict(one, recording, {"p1": ["rating"]}, "both", None, noise=False, joint=None)
        for one in draws.ensemble
    ]
    means = np.array([tree["p1/run-1/rating/mean"].values for tree in members])
    variances = np.array([tree["p1/run-1/rating/variance"].values for tree in members])
    np.testing.assert_allclose(predicted["mean"], means.mean(axis=0), rtol=1e-10)
    np.testing.assert_allclose(predicted["variance"], variances.mean(axis=0) + means.var(axis=0), rtol=1e-10)
    latent = draws.infer_latent()["run-1"].to_dataset()
    assert (latent["variance"] > 0).all()


def test_an_interrupted_run_resumes_bit_for_bit_and_only_itself(fitted, draws, tmp_path, monkeypatch):
    model, recording = fitted
    options = {"chains": 2, "warmup": 40, "draws": 30, "seed": 1, "progress": False, "n_jobs": 1}
    calls = iter(range(10_000))
    whole = chains_module._Chain.report

    def interrupted(self, *, force=False):
        if next(calls) == 55:
            raise RuntimeError("killed")
        self.flush()
        whole(self, force=force)

    monkeypatch.setattr(chains_module._Chain, "report", interrupted)
    with pytest.raises(RuntimeError, match="killed"):
        sample(model, recording, path=tmp_path / "d", **options)
    monkeypatch.setattr(chains_module._Chain, "report", whole)
    with pytest.raises(FileExistsError, match="resume=True"):
        sample(model, recording, path=tmp_path / "d", **options)
    with pytest.raises(ValueError, match=r"settings\.seed \(1 on disk, 2 now\)"):
        sample(model, recording, path=tmp_path / "d", resume=True, **options | {"seed": 2})
    again = sample(model, recording, path=tmp_path / "d", resume=True, **options)
    for key, rows in draws.rows.items():
        np.testing.assert_array_equal(again.rows[key], rows)
    np.testing.assert_array_equal(again.posterior["noise"], draws.posterior["noise"])


def test_features_without_data_are_no_channels_and_spoil_no_verdict():
    rng, times = np.random.default_rng(0), 1.5 * np.arange(20)
    values = rng.standard_normal((20, 4))
    values[:, 2] = np.nan
    with pytest.warns(msrm.recording.RecordingWarning, match="brain"):
        recording = msrm.Recording.from_dict({"p1": {"run-1": {"brain": (values, times)}}})
    fit = GPMSRM(1, {"brain": msrm.Identity()}, n_starts=1, tol=1e-2, progress=False).fit(recording)
    found = sample(fit, recording, chains=2, warmup=10, draws=30, progress=False)
    assert list(found.posterior["channel"].values) == ["p1/brain/0", "p1/brain/1", "p1/brain/3"]
    assert np.isfinite(found.posterior["offset"]).all()
    assert (found.summary().table["problem"] == "").all()
    with pytest.raises(ValueError, match="per_member must be a positive integer, found 0"):
        found.sample_latent(per_member=0)
    # What is asked for by feature still has its place.
    assert np.isnan(found.offset("p1", "brain").sel(feature="2")).all()


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize("at", [23, 57, 100])  # warm-up and draws of the first chain, warm-up of the second
def test_ctrl_c_within_a_sweep_changes_no_draw_of_the_resumed_run(fitted, draws, tmp_path, monkeypatch, at):
    model, recording = fitted
    options = {"chains": 2, "warmup": 40, "draws": 30, "seed": 1, "progress": False, "n_jobs": 1}
    calls, whole = iter(range(10_000)), Sweeper.draw_latents

    def pressed(self, rng, current):
        whole(self, rng, current)
        if next(calls) == at:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Sweeper, "draw_latents", pressed)
    with pytest.raises(KeyboardInterrupt):
        sample(model, recording, path=tmp_path / "d", **options)
    monkeypatch.undo()
    again = sample(model, recording, path=tmp_path / "d", resume=True, **options)
    for key, rows in draws.rows.items():
        np.testing.assert_array_equal(again.rows[key], rows)


def test_a_folder_takes_one_process_at_a_time(tmp_path):
    one, other = (DrawStore.resume(tmp_path / "d", IDENTITY) for _ in range(2))
    with one.running():
        with pytest.raises(RuntimeError, match=r"another process is sampling into .*d"), other.running():
            pass
        assert one.is_running
    with other.running():
        assert other.is_running


def test_what_cannot_be_sampled_is_refused(fitted):
    model, recording = fitted
    with pytest.raises(ValueError, match="sampler must be one of 'gibbs'"):
        sample(model, recording, sampler="hmc")
    with pytest.raises(ValueError, match="draws must be an integer of at least 1, found 0"):
        sample(model, recording, draws=0)
    with pytest.raises(ValueError, match="chains must be an integer of at least 1, found True"):
        sample(model, recording, chains=True)
    with pytest.raises(TypeError, match="path must be a folder for the blocks of draws, or None, found ''"):
        sample(model, recording, path="")
    with pytest.raises(TypeError, match="resume must be True or False, found 'yes'"):
        sample(model, recording, resume="yes")
    with pytest.raises(ValueError, match="seed must be an integer of at least 0, found -1"):
        sample(model, recording, seed=-1)
    with pytest.raises(ValueError, match="needs the path"):
        sample(model, recording, resume=True)
    with pytest.raises(ValueError, match="not the one that was fitted"):
        sample(model, recording.select(participants=["p1"]))
    with pytest.raises(ValueError, match="not fitted yet"):
        sample(GPMSRM(2, model.responses), recording)
