"""Cores, thread limits, progress, what was running, and the warnings of the guard."""

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from msrm import runtime
from msrm.runtime import doctor, facts, probe, warn
from msrm.runtime.workers import parallel_map, uninterrupted


def blas_counts() -> list[int]:
    """Threads of every BLAS library now, by a fresh scan of the process."""
    return [library["num_threads"] for library in ThreadpoolController().info() if library["user_api"] == "blas"]


@pytest.fixture
def two_threads():
    """Every BLAS library at two threads, as a user might have set it."""
    assert np.ones((2, 2)).sum() == 4
    with ThreadpoolController().limit(limits=2, user_api="blas"):
        yield


class TestBlasThreads:
    def test_limits_inside_and_restores_after(self, two_threads):
        with runtime.blas_threads(1):
            assert set(blas_counts()) == {1}
        assert set(blas_counts()) == {2}

    def test_restores_after_an_error(self, two_threads):
        with pytest.raises(KeyError, match="inside"), runtime.blas_threads(1):
            raise KeyError("inside")
        assert set(blas_counts()) == {2}

    def test_the_innermost_block_wins(self, two_threads):
        with runtime.blas_threads(1):
            with runtime.blas_threads(2):
                assert set(blas_counts()) == {2}
            assert set(blas_counts()) == {1}
        assert set(blas_counts()) == {2}

    def test_overlapping_python_threads_restore_the_original(self, two_threads):
        opened, finish = threading.Event(), threading.Event()

        def other():
            with runtime.blas_threads(1):
                opened.set()
                finish.wait(10)

        thread = threading.Thread(target=other)
        with runtime.blas_threads(1):
            thread.start()
            opened.wait(10)
        assert set(blas_counts()) == {1}
        finish.set()
        thread.join(10)
        assert set(blas_counts()) == {2}

    def test_a_worker_thread_can_limit(self, two_threads):
        seen = []

        def other():
            with runtime.blas_threads(1):
                seen.extend(blas_counts())

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
        assert set(seen) == {1}
        assert set(blas_counts()) == {2}

    def test_a_library_loaded_later_is_found(self):
        code = (
            "import msrm.runtime as r\n"
            "with r.blas_threads(1): pass\n"
            "assert r.blas_libraries() == []\n"
            "import numpy\n"
            "found = r.blas_libraries()\n"
            "assert found, 'numpy brought no BLAS'\n"
            "found[0].set_num_threads(2)\n"
            "with r.blas_threads(1): assert found[0].get_num_threads() == 1\n"
            "assert found[0].get_num_threads() == 2\n"
        )
        env = os.environ | {"OPENBLAS_NUM_THREADS": "2"}
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=env)

    def test_costs_microseconds(self):
        def once() -> float:
            start = time.perf_counter()
            for _ in range(100):
                with runtime.blas_threads(1):
                    pass
            return (time.perf_counter() - start) / 100

        assert min(once() for _ in range(20)) < 50e-6

    def test_refuses_no_threads(self):
        with pytest.raises(ValueError, match="at least 1 thread, found 0"), runtime.blas_threads(0):
            pass


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


class TestCores:
    @pytest.mark.parametrize(
        ("files", "cores"),
        [
            ({}, None),
            ({"proc/self/cgroup": "0::/user/job\n", "sys/fs/cgroup/user/job/cpu.max": "max 100000\n"}, None),
            ({"proc/self/cgroup": "0::/user/job\n", "sys/fs/cgroup/user/job/cpu.max": "250000 100000\n"}, 2.5),
            (
                {
                    "proc/self/cgroup": "0::/user/job\n",
                    "sys/fs/cgroup/user/job/cpu.max": "max 100000\n",
                    "sys/fs/cgroup/user/cpu.max": "150000 100000\n",
                },
                1.5,
            ),
            (
                {
                    "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
                    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
                    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
                },
                4.0,
            ),
            (
                {
                    "proc/self/cgroup": "1:cpu:/\n",
                    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                },
                None,
            ),
            ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "garbage\n"}, None),
        ],
        ids=["none", "v2-max", "v2", "v2-parent", "v1-host-path", "v1-unlimited", "unreadable"],
    )
    def test_cgroup_quota(self, tmp_path, files, cores):
        assert runtime.cgroup_cores(write(tmp_path, files)) == cores

    @pytest.mark.parametrize(("quota", "affinity", "usable"), [(None, 8, 8), (1.5, 8, 2), (0.2, 8, 1), (64.0, 8, 8)])
    def test_the_smaller_of_affinity_and_quota(self, monkeypatch, quota, affinity, usable):
        monkeypatch.setattr(runtime.cores, "cgroup_cores", lambda: quota)
        monkeypatch.setattr(runtime.cores, "affinity_cores", lambda: affinity)
        assert runtime.available_cores() == usable

    @pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
    def test_affinity_is_respected(self):
        code = (
            "import os, msrm.runtime as r\n"
            "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
            "assert r.available_cores() == 1\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class TestProgress:
    def test_silent_when_not_a_terminal(self):
        stream = io.StringIO()
        with redirect_stderr(stream):
            assert list(runtime.progress(range(3), desc="runs")) == [0, 1, 2]
        assert stream.getvalue() == ""

    def test_drawn_when_asked(self, capsys):
        with runtime.progress(2, desc="sweeps", enabled=True) as bar:
            bar.update(2)
        assert "sweeps" in capsys.readouterr().err


class TestDescribe:
    def test_says_what_a_paper_needs(self):
        found = runtime.describe()
        assert found["versions"]["numpy"] == np.__version__
        assert found["cores"]["available"] == runtime.available_cores()
        assert found["blas"][0]["threads"] == blas_counts()[0]
        assert {"library", "version", "architecture", "threads", "layer", "file"} == set(found["blas"][0])
        assert json.loads(json.dumps(found)) == found

    def test_does_not_import_jax(self):
        code = "import sys, msrm.runtime as r; assert r.describe()['jax'] is None; assert 'jax' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    def test_does_not_start_the_devices_of_an_imported_jax(self):
        pytest.importorskip("jax")
        code = (
            "import jax, msrm.runtime as r\n"
            "from jax._src.xla_bridge import backends_are_initialized as up\n"
            "assert r.describe()['jax'] is None and not up()\n"
            "jax.config.update('jax_enable_x64', True)\n"
            "jax.numpy.ones(2)\n"
            "found = r.describe()\n"
            "assert found['jax']['platform'] == 'cpu' and found['jax']['x64'] and found['xla_threads'] >= 1\n"
        )
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=env)

    def test_cards_from_the_driver(self, tmp_path):
        card = "proc/driver/nvidia/gpus/0000:01:00.0/information"
        assert runtime.nvidia_gpus(tmp_path) == []
        assert runtime.nvidia_gpus(write(tmp_path, {"dev/nvidia0": "", "dev/nvidiactl": ""})) == ["NVIDIA GPU"]
        assert runtime.nvidia_gpus(write(tmp_path, {card: "Model: \t NVIDIA H200\nIRQ: 5\n"})) == ["NVIDIA H200"]

    def test_the_driver_is_told_without_starting_cuda(self, tmp_path):
        assert facts.nvidia_driver(tmp_path) is None
        told = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12\n"
        assert facts.nvidia_driver(write(tmp_path, {"proc/driver/nvidia/version": told})) == "580.159.04"

    def test_git_outside_a_checkout(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert runtime.describe()["git"]["working_folder"] is None


class TestProbe:
    def test_finds_the_cpu(self, monkeypatch):
        pytest.importorskip("jax")
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        found = runtime.probe_jax()
        assert found["platform"] == "cpu"
        assert found["devices"][0]["platform"] == "cpu"

    def test_a_device_that_is_not_there_is_an_error(self, monkeypatch):
        pytest.importorskip("jax")
        monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
        assert "no_such_platform" in runtime.probe_jax()["error"]

    @pytest.mark.parametrize(
        ("child", "message"),
        [
            ("import os; os.abort()", "was ended by signal 6"),
            ("import sys; sys.exit('plugin mismatch')", "ended with 1: plugin mismatch"),
            ("import time; time.sleep(60)", "did not start within 3 s"),
        ],
        ids=["crash", "error", "hang"],
    )
    def test_a_plugin_that_crashes_only_ends_the_child(self, monkeypatch, child, message):
        pytest.importorskip("jax")
        monkeypatch.setattr(probe, "_CHILD", child)
        assert message in runtime.probe_jax(timeout=3)["error"]


@pytest.fixture
def fresh_guard(monkeypatch):
    """A guard that has not warned, on a machine without problems; returns a function that sets conditions."""
    monkeypatch.setattr(warn, "_given", set())

    def machine(threads=1, cores=4, jax=None, gpus=(), **variables):
        library = SimpleNamespace(internal_api="openblas", filepath="/x/libopenblas.so", num_threads=threads)
        monkeypatch.setattr(warn, "blas_libraries", lambda: [library])
        monkeypatch.setattr(warn, "available_cores", lambda: cores)
        monkeypatch.setattr(warn, "jax_facts", lambda: jax)
        monkeypatch.setattr(warn, "nvidia_gpus", lambda: list(gpus))
        for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "NVIDIA_TF32_OVERRIDE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return machine


JAX = {"version": "0.11.2", "platform": "cpu", "x64": True, "matmul_precision": "highest", "devices": []}


class TestGuard:
    @pytest.mark.parametrize(
        ("machine", "message"),
        [
            ({"threads": 64}, r"starts 64 threads but this process may use 4 cores.*export OPENBLAS_NUM_THREADS=4"),
            ({"jax": JAX, "gpus": ["NVIDIA H200"]}, r"NVIDIA H200 is visible but JAX .*'msrm\[bayesian-cuda\]'"),
            ({"jax": JAX | {"x64": False}}, r"float32.*jax.config.update\('jax_enable_x64', True\)"),
            ({"jax": JAX | {"matmul_precision": "tensorfloat32"}}, r"'tensorfloat32'.*'highest'"),
            ({"jax": JAX, "NVIDIA_TF32_OVERRIDE": "1"}, "unset NVIDIA_TF32_OVERRIDE"),
        ],
        ids=["threads", "gpu", "float32", "precision", "override"],
    )
    def test_warns_once_with_the_line_to_type(self, fresh_guard, machine, message):
        fresh_guard(**machine)
        with pytest.warns(runtime.GuardWarning, match=message) as given:
            runtime.guard()
        assert len(given) == 1
        runtime.guard()

    @pytest.mark.parametrize(
        "machine",
        [
            {},
            {"threads": 4},
            {"gpus": ["NVIDIA H200"]},
            {"jax": JAX | {"platform": "gpu"}, "gpus": ["NVIDIA H200"]},
            {"jax": JAX, "gpus": ["NVIDIA H200"], "JAX_PLATFORMS": "cpu"},
            {"jax": JAX, "gpus": ["NVIDIA H200"], "CUDA_VISIBLE_DEVICES": ""},
            {"jax": JAX | {"matmul_precision": None}},
        ],
        ids=["plain", "all cores", "no jax", "gpu used", "cpu asked for", "hidden", "default precision"],
    )
    def test_quiet_when_there_is_nothing_to_do(self, fresh_guard, machine):
        fresh_guard(**machine)
        runtime.guard()


H200 = {"name": "NVIDIA H200", "driver_version": "580.65.06", "memory.total": 143771.0, "memory.free": 143000.0}
CUDA = {"jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda13-plugin": "0.11.2"}
ON_GPU = JAX | {"platform": "gpu", "devices": [{"kind": "NVIDIA H200"}] * 2}


def looked_at(card=None, **changes):
    """Findings {topic: Finding} of a GPU machine with the given changes."""
    machine = {"versions": CUDA, "environment": {}, "gpus": ["NVIDIA H200"], "jax": ON_GPU, "xla_threads": 8}
    return {found.topic: found for found in doctor.jax_findings(machine | changes, [H200 | (card or {})])}


class TestDoctor:
    def test_a_good_gpu_machine(self):
        found = looked_at()
        assert {finding.level for finding in found.values()} == {"ok"}
        assert found["JAX"].found == "0.11.2 on gpu: 2 x NVIDIA H200"
        assert found["GPU memory"].line == "export XLA_PYTHON_CLIENT_PREALLOCATE=false"

    @pytest.mark.parametrize(
        ("changes", "topic", "level", "message", "line"),
        [
            (
                {"versions": CUDA | {"jax-cuda13-plugin": "0.10.0"}},
                "CUDA plugin",
                "error",
                "jax-cuda13-plugin 0.10.0 does not match jaxlib 0.11.2",
                "pip install --upgrade 'msrm[bayesian-cuda]'",
            ),
            ({"card": {"driver_version": "550.54"}}, "driver", "error", "older than CUDA 13 needs (580)", "update the"),
            ({"jax": {"error": "was ended by signal 6"}}, "JAX", "error", "signal 6", "pip install --upgrade --force"),
            (
                {"jax": {"error": "Unable to initialize"}, "environment": {"JAX_PLATFORMS": "cuda"}},
                "JAX",
                "error",
                "Unable",
                "unset JAX_PLATFORMS",
            ),
            (
                {"jax": {"error": "x"}, "environment": {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "-1"}},
                "JAX",
                "error",
                "x",
                "unset CUDA_VISIBLE_DEVICES",
            ),
            ({"jax": JAX, "environment": {"JAX_PLATFORMS": "cuda,cpu"}}, "JAX", "error", "asks for a GPU", "unset"),
            ({"jax": JAX}, "JAX", "warning", "although NVIDIA H200 is there", "python -c"),
            ({"jax": JAX, "versions": {"jax": "0.11.2"}}, "JAX", "warning", "NVIDIA H200 is there", "pip install"),
            ({"jax": JAX, "environment": {"JAX_PLATFORMS": "cpu"}}, "JAX", "ok", "asked for", "unset JAX_PLATFORMS"),
            ({"jax": JAX, "environment": {"CUDA_VISIBLE_DEVICES": "-1"}}, "JAX", "ok", "hides", "unset CUDA_VISIBLE"),
            ({"card": {"memory.free": 9000.0}}, "GPU memory", "warning", "8.8 of 140.4 GiB free", "export XLA_PYTHON"),
            ({"environment": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}}, "GPU memory", "ok", "as needed", ""),
            (
                {"environment": {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.999"}},
                "GPU memory",
                "warning",
                "JAX takes 100% at its start, which is not there",
                "export XLA_PYTHON",
            ),
            (
                {"environment": {"XLA_PYTHON_CLIENT_MEM_FRACTION": "40%"}},
                "GPU memory",
                "error",
                "not a number",
                "unset XLA_PYTHON_CLIENT_MEM_FRACTION",
            ),
            ({"card": {"memory.total": np.nan}}, "GPU memory", "warning", "does not tell its memory", "nvidia-smi"),
            ({"card": {"driver_version": "[N/A]"}}, "driver", "warning", "does not tell its version", "nvidia-smi"),
            ({"environment": {"JAX_ENABLE_X64": "0"}}, "float64", "warning", "switches it off", "unset JAX_ENABLE_X64"),
            (
                {"environment": {"JAX_DEFAULT_MATMUL_PRECISION": "tensorfloat32"}},
                "matrix products",
                "warning",
                "tensorfloat32",
                "unset JAX_DEFAULT_MATMUL_PRECISION",
            ),
            ({"environment": {"NVIDIA_TF32_OVERRIDE": "1"}}, "matrix products", "warning", "TF32", "unset NVIDIA_TF32"),
            ({"versions": {}, "jax": None}, "GPU", "warning", "is not used", "pip install 'msrm[bayesian-cuda]'"),
        ],
    )
    def test_each_problem_has_its_line(self, changes, topic, level, message, line):
        found = looked_at(**changes)[topic]
        assert found.level == level
        assert message in found.found
        assert found.line.startswith(line)

    def test_a_cache_that_others_can_write(self, tmp_path):
        tmp_path.chmod(0o777)
        found = looked_at(environment={"JAX_COMPILATION_CACHE_DIR": str(tmp_path)})["compilation cache"]
        assert (found.level, found.line) == ("error", f"chmod go-w {tmp_path}")
        tmp_path.chmod(0o700)
        found = looked_at(environment={"JAX_COMPILATION_CACHE_DIR": str(tmp_path)})["compilation cache"]
        assert found.level == "ok"

    def test_the_packages_own_cache_that_others_can_write(self, tmp_path, monkeypatch):
        monkeypatch.setattr(doctor.Path, "home", lambda: tmp_path)
        assert "compilation cache" not in looked_at()
        folder = tmp_path / ".cache" / "msrm" / "xla-0.11.2-0"
        folder.mkdir(parents=True)
        folder.chmod(0o770)
        found = looked_at()["compilation cache"]
        assert (found.level, found.line) == ("error", f"chmod go-w {folder}")

    def test_more_blas_threads_than_the_quota_allows(self, fresh_guard):
        fresh_guard(threads=64, cores=2)
        machine = {"cores": {"available": 2, "affinity": 64, "quota": 1.5}, "blas": [], "environment": {}}
        found = {finding.topic: finding for finding in doctor.core_findings(machine)}
        assert found["cores"].found == "2 usable (affinity 64, container quota 1.5)"
        assert found["BLAS threads"].level == "warning"
        assert "starts 64 threads but this process may use 2 cores" in found["BLAS threads"].found
        assert found["BLAS threads"].line == "export OPENBLAS_NUM_THREADS=2"

    def test_packages(self):
        requirements = ["numpy>=2.0", 'jax[cuda13]>=0.11,<0.12; extra == "cuda"', 'matplotlib>=3; extra == "plots"']
        versions = {"numpy": "1.26", "jax": "0.11.2"}
        found = {f.topic: f for f in doctor.package_findings(requirements, versions.get)}
        assert (found["packages"].level, found["packages"].found) == ("error", "numpy 1.26 does not fit >=2.0")
        assert "jax-cuda13-plugin is missing" in found["extra cuda"].found
        assert found["extra plots"].line == "pip install --upgrade 'msrm[plots]'"

    def test_cards_by_nvidia_smi(self, tmp_path, monkeypatch):
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.65.06, 143771, 143000, 771'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert doctor.cards() == [H200 | {"memory.used": 771.0}]

    def test_this_machine(self):
        found = {finding.topic: finding for finding in doctor.diagnose(probe=False)}
        assert found["archive"].level == "ok"
        assert str(runtime.available_cores()) in found["cores"].found


def test_a_worker_that_is_killed_ends_the_work():
    """The one that was started last, too, which a pool of Python does not watch until the next job."""

    def kill_the_last():
        while len(children := multiprocessing.active_children()) < 2:
            time.sleep(0.05)
        time.sleep(1.0)
        max(children, key=lambda child: child.pid).kill()

    killer = threading.Thread(target=kill_the_last)
    killer.start()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"a worker process was ended from outside.*n_jobs"):
        parallel_map(time.sleep, [(90.0,), (90.0,)], n_jobs=2, progress=False)
    assert time.monotonic() - begin < 80.0
    killer.join()


def test_work_is_told_to_stop_before_it_is_waited_for(tmp_path):
    mark = tmp_path / "running"
    mark.touch()
    with pytest.raises(ZeroDivisionError):
        parallel_map(divide_or_wait, [(0, mark), (1, mark)], n_jobs=2, progress=False, stop=mark.unlink)


def divide_or_wait(number, mark):
    """One fails, the other goes on as long as the mark is there."""
    while number and mark.exists():
        time.sleep(0.05)
    return 1 / number


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_waits_for_the_end_of_what_belongs_together():
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest of the block")
        done.append("never")
    assert done == ["the rest of the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # An error within is not hidden, and elsewhere than in the main thread signals are not ours to hold.
    with pytest.raises(ZeroDivisionError), uninterrupted():
        raise ZeroDivisionError
    thread = threading.Thread(target=lambda: done.append(uninterrupted().__enter__()))
    thread.start()
    thread.join()
    assert done[1:] == [None]
