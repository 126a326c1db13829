"""Sampling that is extended, interrupted or out of disk: what is kept, what is said, what the bar tells."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import msrm
from msrm import runtime
from msrm.diagnostics import block_statistics
from msrm.gp.gibbs import chains as chains_module
from msrm.gp.sampling import sample
from msrm.gp.storage import DrawStore
from msrm.gp.watching import Watch, slowest

OPTIONS = {"chains": 2, "warmup": 10, "seed": 4, "progress": False, "n_jobs": 1}


def recording_of() -> msrm.Recording:
    rng = np.random.default_rng(0)
    times = 1.5 * np.arange(10)
    data = {p: {"run-1": {"rating": (rng.standard_normal((10, 3)), times)}} for p in ("p1", "p2")}
    return msrm.Recording.from_dict(data)


def model_of() -> msrm.GPMSRM:
    lag = msrm.Free(0.2, bounds=(-1.0, 1.0), prior=msrm.Normal(0.0, 0.5))
    return msrm.GPMSRM(1, {"rating": msrm.Gaussian(width=0.6, lag=lag)}, n_starts=1, tol=1e-2, progress=False)


@pytest.fixture(scope="module")
def fitted():
    recording = recording_of()
    return model_of().fit(recording), recording


def test_more_draws_extend_a_run_to_what_it_would_have_been_and_fewer_are_refused(fitted, tmp_path):
    whole = sample(*fitted, draws=30, **OPTIONS)
    sample(*fitted, draws=12, path=tmp_path / "d", **OPTIONS)
    extended = sample(*fitted, draws=30, path=tmp_path / "d", resume=True, **OPTIONS)
    for name in ("noise", "response", "log_likelihood_marginal", "loading_norm2"):
        np.testing.assert_array_equal(extended.posterior[name], whole.posterior[name])
    assert extended.tree.attrs["draws"] == 30
    with pytest.raises(ValueError, match="holds 30 draws of a chain, more than draws=29"):
        sample(*fitted, draws=29, path=tmp_path / "d", resume=True, **OPTIONS)
    with pytest.raises(ValueError, match=r"settings\.warmup \(10 on disk, 11 now\)"):
        sample(*fitted, draws=30, path=tmp_path / "d", resume=True, **OPTIONS | {"warmup": 11})


def test_ctrl_c_keeps_the_draws_and_says_how_to_continue(fitted, tmp_path, monkeypatch):
    calls = iter(range(1000))
    report = chains_module._Chain.report

    def interrupted(self, *, force=False):
        if next(calls) == 10 + 7:
            raise KeyboardInterrupt
        report(self, force=force)

    monkeypatch.setattr(chains_module._Chain, "report", interrupted)
    for path in (tmp_path / "named", None):
        calls = iter(range(1000))
        with pytest.raises(KeyboardInterrupt, match=r"continue with path=.*, resume=True") as stopped:
            sample(*fitted, draws=20, path=path, **OPTIONS)
        folder = str(stopped.value).split("path='")[1].split("'")[0]
        assert DrawStore(type(tmp_path)(folder)).last_of(0).draws == 8
        # The second chain did not start after the first was interrupted.
        assert DrawStore(type(tmp_path)(folder)).last_of(1) is None
    monkeypatch.setattr(chains_module._Chain, "report", report)
    again = sample(*fitted, draws=20, path=folder, resume=True, **OPTIONS)
    np.testing.assert_array_equal(again.posterior["noise"], sample(*fitted, draws=20, **OPTIONS).posterior["noise"])


FULL = """
    import resource, signal, sys
    sys.path.insert(0, {tests!r})
    import msrm.gp.gibbs.chains as chains
    from test_sampling_runs import OPTIONS, model_of, recording_of
    from msrm.gp.sampling import sample
    recording = recording_of()
    model = model_of().fit(recording)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        sample(model, recording, path={folder!r}, draws=400, **OPTIONS)
    except OSError as error:
        print(error)
"""


@pytest.mark.skipif(os.name != "posix", reason="file size limits are POSIX")
def test_a_full_disk_stops_the_run_and_names_the_folder(tmp_path):
    script = textwrap.dedent(FULL.format(tests=os.path.dirname(__file__), folder=str(tmp_path / "d")))
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "cannot write draws-000000000.npz of chain-00" in out.stdout, out.stderr
    assert "resume=True" in out.stdout
    assert not (tmp_path / "d" / "running").exists()
    assert DrawStore(tmp_path / "d").last_of(1) is None


CTRL_C = """
    import signal, sys
    # A shell's background jobs ignore Ctrl-C, and so would this child of one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, {tests!r})
    from test_sampling_runs import OPTIONS, model_of, recording_of
    from msrm.gp.sampling import sample
    recording = recording_of()
    model = model_of().fit(recording)
    print("ready", flush=True)
    try:
        sample(model, recording, path={folder!r}, draws=10**6, **(OPTIONS | dict(n_jobs=2)))
    except KeyboardInterrupt as error:
        print(error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX")
@pytest.mark.parametrize("early", [False, True], ids=["while chains run", "while their processes start"])
def test_ctrl_c_on_a_terminal_reaches_the_parent_and_every_chain_quietly(tmp_path, early):
    script = textwrap.dedent(CTRL_C.format(tests=os.path.dirname(__file__), folder=str(tmp_path / "d")))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, **pipes)
    assert child.stdout.readline() == "ready\n"
    awaited = tmp_path / "d" / ("running" if early else "chain-01/progress.json")
    deadline = time.monotonic() + 100
    while not awaited.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5 if early else 1.5)
    os.killpg(child.pid, signal.SIGINT)
    said, problems = child.communicate(timeout=60)
    assert problems == ""
    if early:
        assert "sampling stopped before any draw was on disk" in said
    else:
        assert "continue with path=" in said
        assert DrawStore(tmp_path / "d").last_of(1).draws > 0


def test_the_order_of_loaded_libraries_is_no_part_of_a_run(fitted, tmp_path, monkeypatch):
    facts = runtime.describe()
    two = [facts["blas"][0], facts["blas"][0] | {"version": "0.0.1"}]
    for blas, resume in ((two, False), (two[::-1], True)):
        monkeypatch.setattr("msrm.gp.sampling.runtime.describe", lambda blas=blas: facts | {"blas": blas})
        sample(*fitted, draws=3, path=tmp_path / "d", resume=resume, **OPTIONS)


def test_the_bar_counts_sweeps_and_names_the_slowest_invariant(fitted, tmp_path):
    draws = sample(*fitted, draws=40, path=tmp_path / "d", **OPTIONS)
    labels = {"log_likelihood_marginal": ["log_likelihood_marginal"], "noise": ["noise[p1]", "noise[p2]"]}
    name, least = slowest(DrawStore(tmp_path / "d"), 2, labels)
    posterior = draws.posterior
    expected = {
        "log_likelihood_marginal": posterior["log_likelihood_marginal"].values[None],
        "noise[p1]": posterior["noise"].values[None, ..., 0],
        "noise[p2]": posterior["noise"].values[None, ..., 1],
    }
    ess = {key: float(block_statistics(np.ascontiguousarray(v))["ess_bulk"][0]) for key, v in expected.items()}
    assert name == min(ess, key=ess.get)
    assert least == pytest.approx(min(ess.values()), rel=1e-10)
    with Watch(DrawStore(tmp_path / "d"), 2, 100, labels, enabled=True) as watch:
        assert (watch._bar.n, watch._bar.total) == (100, 100)
    quiet = Watch(DrawStore(tmp_path / "d"), 2, 100, labels, enabled=False)
    with quiet:
        assert quiet._thread is None
    assert slowest(DrawStore.create(tmp_path / "empty", {}), 2, labels) is None
