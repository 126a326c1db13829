"""Where a model computes: every condition simulated, on a machine without a card."""

import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import msrm
from msrm.gp import devices, model, native_grid
from msrm.gp.dense import Dense
from msrm.gp.devices import (
    Placement,
    cuda_problem,
    evaluation_placement,
    on_device,
    sweep_placement,
    use_compilation_cache,
)
from msrm.gp.jax_backend import NativeStateSpace
from msrm.gp.native_dense import NativeDense
from msrm.gp.native_grid import NativeGrid
from msrm.gp.statespace import StateSpace
from msrm.nodes import GroupStatistics, NodeGroup
from msrm.runtime import folders

COUNTS = {"chains": 4, "warmup": 1000, "draws": 1000}


def backend(seconds=30.0):
    groups = {
        "run": {
            "brain": NodeGroup("brain", np.arange(0.0, seconds, 1.8), msrm.Identity()),
            "rating": NodeGroup(
                "rating", np.arange(0.0, seconds, 1.2), msrm.Gaussian(0.6, msrm.Free(0.0, (-1.5, 1.5)))
            ),
        }
    }
    return StateSpace(groups, 2, 0.9)


@pytest.fixture
def card(monkeypatch):
    """A machine with a card, its plugin, and JAX on it."""
    monkeypatch.setattr(devices, "visible_gpus", lambda: ["NVIDIA H200"])
    monkeypatch.setattr(devices, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(devices, "jax_facts", lambda: {"platform": "gpu"})


def test_without_a_card_auto_is_the_cpu_and_cuda_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(devices, "visible_gpus", lambda: [])
    found = evaluation_placement("auto", backend())
    assert found == devices.Placement("cpu", "no NVIDIA card is visible to this process")
    monkeypatch.setattr(devices, "find_spec", lambda name: None if name.startswith("jax_cuda") else SimpleNamespace())
    with pytest.raises(RuntimeError, match=r"cannot be used: JAX's CUDA plugin is not installed\. Run: pip install"):
        evaluation_placement("cuda", backend())
    monkeypatch.setattr(devices, "find_spec", lambda name: SimpleNamespace())
    with pytest.raises(RuntimeError, match=r"no NVIDIA card is visible.*nvidia-smi, CUDA_VISIBLE_DEVICES"):
        evaluation_placement("cuda", backend())
    with pytest.raises(ValueError, match="device must be one of 'auto', 'cpu', 'cuda', found 'gpu'"):
        evaluation_placement("gpu", backend())


def test_a_card_is_taken_where_it_is_estimated_to_be_faster(card):
    # A dense gradient of order 2,700 takes a second on a core and six milliseconds on a card.
    long = evaluation_placement("auto", Dense(backend(1000.0).groups, 2))
    assert long.platform == "cuda"
    assert "on the card with its compilation" in long.reason
    # Fits on latent grids, of whatever length, were no faster on the card (benchmarks/cuda.json, fits).
    for seconds in (30.0, 200_000.0):
        found = evaluation_placement("auto", backend(seconds))
        assert found.platform == "cpu"
        assert "not faster on the card" in found.reason
    assert evaluation_placement("auto", Dense(backend(100.0).groups, 2)).platform == "cpu"
    assert evaluation_placement("cuda", backend()) == devices.Placement("cuda", "device='cuda' was asked for")
    assert evaluation_placement("cpu", backend(200_000.0)).platform == "cpu"
    assert sweep_placement("auto", backend(200_000.0), COUNTS, "").platform == "cuda"
    assert sweep_placement("auto", backend(), COUNTS | {"draws": 10, "warmup": 10}, "").platform == "cpu"


def test_what_the_compiled_sampler_lacks_runs_on_the_cpu_or_is_refused(card):
    found = sweep_placement("auto", backend(2000.0), COUNTS, "run offsets")
    assert found == devices.Placement("cpu", "the compiled Gibbs sampler does not have run offsets")
    with pytest.raises(NotImplementedError, match="does not have run offsets"):
        sweep_placement("cuda", backend(), COUNTS, "run offsets")


def test_problems_of_jax_are_named(card, monkeypatch):
    assert cuda_problem(probe=True) == ""
    monkeypatch.setattr(devices, "jax_facts", lambda: {"platform": "cpu"})
    assert cuda_problem(probe=True) == "JAX runs on cpu. Run: unset JAX_PLATFORMS"
    monkeypatch.setattr(devices, "jax_facts", lambda: None)
    versions = {"jax-cuda13-plugin": "0.11.1", "jaxlib": "0.11.2"}
    monkeypatch.setattr(devices, "version", versions.__getitem__)
    assert "plugin 0.11.1 does not match jaxlib 0.11.2" in cuda_problem(probe=True)
    versions["jax-cuda13-plugin"] = "0.11.2"
    monkeypatch.setattr(devices, "nvidia_driver", lambda: None)
    monkeypatch.setattr(devices, "probe_jax", lambda: {"error": "was ended by signal 6"})
    assert cuda_problem(probe=True) == "JAX does not start (was ended by signal 6)"
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    assert "JAX is not installed" in cuda_problem(probe=True)


def test_the_compilation_cache_is_the_owners_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    folder = use_compilation_cache(tmp_path)
    assert folder.parent == tmp_path / ".cache" / "msrm"
    assert jax.lib.__version__ in folder.name
    assert not folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    assert not folder.parent.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    for one in (folder, folder.parent):
        one.chmod(0o777)
        assert use_compilation_cache(tmp_path) is None
        one.chmod(0o700)
    assert use_compilation_cache(tmp_path) == folder
    monkeypatch.setattr(folders.os, "getuid", lambda: 12345)
    assert use_compilation_cache(tmp_path) is None


@pytest.fixture
def probes(card, tmp_path, monkeypatch):
    """A home of its own, how often JAX was tried in a child process, and what it answers there and here."""
    tried, child, here = [], {"platform": "gpu"}, SimpleNamespace(default_backend=lambda: "gpu")
    monkeypatch.setattr(devices.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(devices, "version", lambda name: "0.11.2")
    monkeypatch.setattr(devices, "jax_facts", lambda: None)
    monkeypatch.setattr(devices, "nvidia_driver", lambda: "580.1")
    monkeypatch.setattr(devices, "probe_jax", lambda: tried.append(1) or child)
    monkeypatch.setattr(devices, "import_module", lambda name: here)
    return SimpleNamespace(tried=tried, child=child, here=here)


def test_jax_is_tried_in_a_child_process_once_under_the_same_conditions(probes, monkeypatch):
    for _ in range(3):
        assert cuda_problem(probe=True) == ""
    assert len(probes.tried) == 1
    changes = [
        lambda patch: patch.setattr(devices, "nvidia_driver", lambda: "590.1"),
        lambda patch: patch.setattr(devices, "versions", lambda: {"jax": "0.11.3"}),
        lambda patch: patch.setattr(devices, "visible_gpus", lambda: ["another card"]),
        lambda patch: patch.setattr(devices.platform, "node", lambda: "another machine"),
        lambda patch: patch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0"),
    ]
    for count, change in enumerate(changes, start=2):
        with monkeypatch.context() as patch:
            change(patch)
            assert cuda_problem(probe=True) == cuda_problem(probe=True) == ""
            assert len(probes.tried) == count


@pytest.mark.parametrize("how", ["failed", "on the CPU", "unknown driver", "broken file", "no home"])
def test_jax_is_tried_again_after_anything_but_a_good_start(probes, monkeypatch, how):
    if how == "broken file":
        assert cuda_problem(probe=True) == ""
        next(devices.cache_folder().iterdir()).write_text("{}")
        assert cuda_problem(probe=True) == ""
    else:
        if how == "unknown driver":
            monkeypatch.setattr(devices, "nvidia_driver", lambda: None)
        elif how == "no home":
            monkeypatch.setattr(devices.Path, "home", lambda: Path("~nobody-of-this-name").expanduser())
        else:
            probes.child.clear()
            probes.child |= {"error": "was ended by signal 6"} if how == "failed" else {"platform": "cpu"}
        told = [cuda_problem(probe=True) for _ in range(2)]
        expected = {"failed": "JAX does not start (was ended by signal 6)", "on the CPU": "JAX runs on cpu"}
        assert all(one.startswith(expected.get(how, "")) for one in told)
    assert len(probes.tried) == 2


@pytest.mark.parametrize(
    ("asked", "problem", "told"),
    [
        (
            "cuda",
            AssertionError(),
            "JAX does not start with JAX_PLATFORMS=cuda: AssertionError. Run: unset JAX_PLATFORMS",
        ),
        (None, RuntimeError("no memory"), "JAX does not start: no memory. Run: msrm doctor"),
    ],
)
def test_devices_that_do_not_start_are_named(monkeypatch, asked, problem, told):
    def fails():
        raise problem

    monkeypatch.setattr(devices, "import_module", lambda name: SimpleNamespace(devices=fails))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if asked:
        monkeypatch.setenv("JAX_PLATFORMS", asked)
    with pytest.raises(RuntimeError) as found:
        devices.start_jax()
    assert str(found.value) == told


def test_a_good_start_before_hides_no_bad_one(probes):
    """What is recorded is trusted by starting JAX here, and gone while it starts."""
    assert cuda_problem(probe=True) == ""
    seen = []

    def falls_back():
        seen.append(list(devices.cache_folder().iterdir()))
        return "cpu"

    probes.here.default_backend = falls_back
    assert cuda_problem(probe=True) == "JAX runs on cpu. Run: unset JAX_PLATFORMS"
    assert seen == [[]]
    assert cuda_problem(probe=True) == ""  # tried in a child again
    assert len(probes.tried) == 2

    def fails():
        raise RuntimeError("CUDA_ERROR_UNKNOWN")

    probes.here.default_backend = fails
    assert cuda_problem(probe=True) == "JAX does not start (CUDA_ERROR_UNKNOWN)"
    assert cuda_problem(probe=True) == ""
    assert len(probes.tried) == 3


def test_backends_on_the_device_agree_with_those_on_the_host(monkeypatch):
    monkeypatch.setattr(devices, "use_compilation_cache", lambda: None)
    host, rng = backend(12.0), np.random.default_rng(0)
    statistics = {}
    for name, group in host.groups["run"].items():
        roots = rng.standard_normal((1, 4, 2))
        index = np.zeros(group.n_nodes, int)
        information = rng.standard_normal((group.n_nodes, 2))
        statistics[name] = GroupStatistics(np.einsum("pfk,pfl->pkl", roots, roots), index, information)
    native, values = on_device(host), {"brain": {}, "rating": {"lag": 0.3}}
    assert isinstance(native, NativeGrid)
    assert native.with_moments(2) is native
    expected = host.evidence("run", values, 3.0, statistics, False)
    # Values alone choose grids, where no compilation pays: they are the host's.
    assert native.evidence("run", values, 3.0, statistics, False).log_evidence == expected.log_evidence
    assert not native.compiled
    found = native.evidence("run", values, 3.0, statistics)
    np.testing.assert_allclose(found.log_evidence, expected.log_evidence, rtol=1e-12)
    assert len(native.compiled) == 1
    finer = native.at_step(0.45)
    assert isinstance(finer, NativeGrid)
    assert finer.compiled is native.compiled  # nothing compiled is lost by refining and coming back
    dense = on_device(Dense(host.groups, 2))
    assert isinstance(dense, NativeDense)
    assert dense.posterior("run", values, 3.0, statistics).factor.ok


def test_a_response_that_outgrows_its_windows_compiles_once_more_for_all_that_its_bounds_allow(monkeypatch):
    monkeypatch.setattr(devices, "use_compilation_cache", lambda: None)
    built = []
    monkeypatch.setattr(
        native_grid, "NativeStateSpace", lambda *a, **k: built.append(k["room"]) or NativeStateSpace(*a, **k)
    )
    times = np.arange(0.0, 30.0, 1.0)
    response = msrm.Gaussian(width=msrm.Free(0.3, bounds=(0.2, 4.0)), lag=0.0)
    groups = {"run": {"rating": NodeGroup("rating", times, response)}}
    host = StateSpace(groups, 1, 0.9)
    given = {"rating": GroupStatistics(np.ones((1, 1, 1)), np.zeros(30, int), np.sin(times)[:, None])}
    native = on_device(host)
    for width in (0.3, 0.35, 2.5, 4.0, 0.2):
        values = {"rating": {"width": width}}
        found, expected = (one.evidence("run", values, 3.0, given) for one in (native, host))
        np.testing.assert_allclose(found.log_evidence, expected.log_evidence, rtol=1e-9)
    assert built == [1.25, np.inf]


def test_fits_and_evaluations_on_the_device_are_those_of_the_host(monkeypatch):
    recording = msrm.simulate(features=4, seconds=20.0, factors=1)[0]
    responses = {name: msrm.Identity() for name in recording.modalities}
    arguments = {"likelihood": "statespace", "n_starts": 1, "progress": False}
    host = msrm.GPMSRM(1, responses, device="cpu", **arguments).fit(recording)
    monkeypatch.setattr(devices, "use_compilation_cache", lambda: None)
    monkeypatch.setattr(model, "evaluation_placement", lambda *_: Placement("cuda", "a rehearsal"))
    native = msrm.GPMSRM(1, responses, **arguments).fit(recording)
    assert native.backend_["device"] == "cuda"
    assert abs(native.objective_ - host.objective_) < 0.1
    value, gradient = native.log_likelihood_and_gradient(recording, native.parameters_)
    assert native.log_likelihood(recording, native.parameters_) == value
    exact = msrm.GPMSRM(1, responses, likelihood="dense")
    expected, slopes = exact.log_likelihood_and_gradient(recording, native.parameters_)
    assert abs(value - expected) < 0.05
    for name, slope in slopes.items():
        np.testing.assert_allclose(gradient[name], slope, rtol=1e-2, atol=0.2)


def test_a_model_refuses_a_card_that_is_not_there():
    if sys.platform == "linux" and devices.visible_gpus():
        pytest.skip("there is a card")
    recording, _ = msrm.simulate(features=4, seconds=30.0)
    responses = {name: msrm.Identity() for name in recording.modalities}
    with pytest.raises(RuntimeError, match="device='cuda' cannot be used"):
        msrm.GPMSRM(2, responses, device="cuda").fit(recording)
