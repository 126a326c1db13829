"""Cores, thread limits, progress, what was running, and the warnings of the guard."""

import io
import os
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from msrm import runtime


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
