"""Where a model computes: every condition simulated, on a machine without a card."""

import stat
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import msrm
from msrm.gp import devices
from msrm.gp.dense import Dense
from msrm.gp.devices import cuda_problem, evaluation_placement, on_device, sweep_placement, use_compilation_cache
from msrm.gp.native_dense import NativeDense
from msrm.gp.native_grid import NativeGrid
from msrm.gp.statespace import StateSpace
from msrm.nodes import GroupStatistics, NodeGroup

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
    assert evaluation_placement("auto", backend()).platform == "cpu"
    long = evaluation_placement("auto", backend(200_000.0))
    assert long.platform == "cuda"
    assert "on the card with its compilation" in long.reason
    # A dense gradient of order 2,700 takes a second on a core and six milliseconds on a card.
    assert evaluation_placement("auto", Dense(backend(1000.0).groups, 2)).platform == "cuda"
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
    folder.chmod(0o777)
    assert use_compilation_cache(tmp_path) is None


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
    found = native.evidence("run", values, 3.0, statistics, False)
    np.testing.assert_allclose(found.log_evidence, expected.log_evidence, rtol=1e-12)
    finer = native.at_step(0.45)
    assert isinstance(finer, NativeGrid)
    assert finer.compiled is native.compiled  # nothing compiled is lost by refining and coming back
    dense = on_device(Dense(host.groups, 2))
    assert isinstance(dense, NativeDense)
    assert dense.posterior("run", values, 3.0, statistics).factor.ok


def test_a_model_refuses_a_card_that_is_not_there():
    if sys.platform == "linux" and devices.visible_gpus():
        pytest.skip("there is a card")
    recording, _ = msrm.simulate(features=4, seconds=30.0)
    responses = {name: msrm.Identity() for name in recording.modalities}
    with pytest.raises(RuntimeError, match="device='cuda' cannot be used"):
        msrm.GPMSRM(2, responses, device="cuda").fit(recording)
