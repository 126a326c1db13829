"""Compiled functions are found by what they were made of, in this process and on disk, and never by less."""

import stat
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrm.gp import programs
from msrm.gp.programs import Program, fingerprint
from msrm.runtime import folders


class Pair(NamedTuple):
    first: object
    second: object


@dataclass(frozen=True, eq=False)
class Holder:
    numbers: np.ndarray
    name: str = "a"


# As a class of the package, whose name stands for what it does.
Holder.__module__ = "msrm.held"


class Opaque:
    pass


@dataclass(frozen=True)
class Foreign:
    """A class that another cell of a notebook may define anew under the same name."""

    number: float = 1.0


class Traced:
    """A function that counts how often it is traced."""

    def __init__(self, factor=2.0):
        self.factor, self.traces = factor, 0

    def function(self, pair, scale):
        self.traces += 1
        return {"out": Pair(self.factor * pair.first * scale, pair.second.sum()), "n": pair.first + 1.0}

    def program(self, made_of="the same"):
        return Program(self.function, made_of)


def arguments(size=3):
    return Pair(jnp.arange(float(size)), np.ones(4)), 1.5


def check(made, factor=2.0, size=3):
    np.testing.assert_array_equal(made["out"].first, factor * 1.5 * np.arange(size))
    assert isinstance(made["out"], Pair)
    assert float(made["out"].second) == 4.0
    np.testing.assert_array_equal(made["n"], np.arange(size) + 1.0)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(programs, "_ready", type(programs._ready)())


@pytest.fixture
def on_disk(tmp_path, monkeypatch):
    """A cache folder, for the CPU too: functions without LAPACK can be kept there."""
    monkeypatch.setattr(programs, "_PLATFORMS", ("cpu", "gpu"))
    folder, before = tmp_path / "cache", jax.config.jax_compilation_cache_dir
    folder.mkdir(mode=0o700)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    yield folder / "msrm-programs"
    jax.config.update("jax_compilation_cache_dir", before)


def forget():
    programs._ready.clear()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        ("1", 1),
        ([1, 2], (1, 2)),
        ([1, [2]], [[1], 2]),
        (["ab", "c"], ["a", "bc"]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (np.zeros(2), np.zeros((2, 1))),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), np.array([0.0, -0.0])),
        (Holder(np.ones(2)), Holder(np.array([1.0, 1.0 + 2**-52]))),
        (Holder(np.ones(2)), Holder(np.ones(2), "b")),
        (Holder(np.ones(2)), [np.ones(2), "a"]),
        (None, "None"),
        (slice(1, 2), slice(1, 2, 1)),
    ],
)
def test_different_contents_have_different_fingerprints(one, other):
    assert fingerprint(one) != fingerprint(other)


def test_equal_contents_have_one_fingerprint():
    def made(order):
        return [Holder(np.arange(6.0).reshape(2, 3, order=order)), {"a": (1, None)}, frozenset({"x", "y", "z"}), b"b"]

    assert fingerprint(made("C")) == fingerprint(
        [Holder(np.arange(6.0).reshape(2, 3)), {"a": (1, None)}, frozenset({"z", "y", "x"}), b"b"]
    )
    assert fingerprint(np.arange(6.0).reshape(2, 3).T) == fingerprint(np.arange(6.0).reshape(2, 3).T.copy())
    assert made("F")[0].numbers.flags.f_contiguous


@pytest.mark.parametrize(
    "unknown",
    [Opaque(), Opaque, fingerprint, np.array(["a", None]), Foreign(), Pair(1, 2), np.ma.masked_array([1.0], [True])],
)
def test_unknown_contents_are_refused(unknown):
    with pytest.raises(TypeError, match="not known"):
        fingerprint({"a": [unknown]})


def test_a_program_is_traced_once_for_each_shape():
    traced = Traced()
    program = traced.program()
    for size in (3, 5, 3, 5):
        check(program(*arguments(size)), size=size)
    assert traced.traces == program.count == 2


def test_one_made_of_the_same_is_not_traced_again_and_one_made_of_other_things_is():
    first, same, other = Traced(), Traced(), Traced(3.0)
    check(first.program()(*arguments()))
    check(same.program()(*arguments()))
    check(other.program("other")(*arguments()), 3.0)
    assert (first.traces, same.traces, other.traces) == (1, 0, 1)


def test_parts_of_unknown_contents_are_compiled_for_one_object_alone(on_disk):
    traced = Traced()
    for _ in range(2):
        program = traced.program(Opaque())
        check(program(*arguments()))
        check(program(*arguments()))
    assert traced.traces == 2
    assert not on_disk.exists()


def test_settings_of_jax_and_xla_are_part_of_a_program(monkeypatch):
    traced = Traced()
    check(traced.program()(*arguments()))
    with jax.default_matmul_precision("float32"):
        check(traced.program()(*arguments()))
    assert traced.traces == 2
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    check(traced.program()(*arguments()))
    assert traced.traces == 3


def test_random_numbers_are_those_of_the_settings(monkeypatch):
    def draws(key):
        return jax.random.normal(key, (5,))

    key = jax.random.PRNGKey(0)
    for _ in range(2):
        for partitionable in (True, False):
            with jax.threefry_partitionable(partitionable):
                np.testing.assert_array_equal(Program(draws, "draws")(key), jax.jit(draws)(key))


def test_jax_can_be_told_not_to_compile_or_where():
    traced = Traced()
    with jax.disable_jit():
        check(traced.program()(*arguments()))
        check(traced.program()(*arguments()))
    assert traced.traces == 2
    for device in ("cpu", jax.devices("cpu")[0]):
        with jax.default_device(device):
            check(Traced().program()(*arguments()))


def test_the_next_process_finds_it_on_disk(on_disk):
    first, second = Traced(), Traced()
    check(first.program()(*arguments()))
    assert len(list(on_disk.iterdir())) == 1
    assert stat.S_IMODE(on_disk.stat().st_mode) == 0o700
    forget()
    check(second.program()(*arguments()))
    assert (first.traces, second.traces) == (1, 0)


@pytest.mark.parametrize("content", [b"", b"no program", None])
def test_a_file_that_cannot_be_loaded_is_made_anew(on_disk, content):
    check(Traced().program()(*arguments()))
    (file,) = on_disk.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    forget()
    again, last = Traced(), Traced()
    check(again.program()(*arguments()))
    forget()
    check(last.program()(*arguments()))
    assert (again.traces, last.traces) == (1, 0)


def test_another_source_version_or_device_finds_nothing(on_disk, monkeypatch):
    check(Traced().program()(*arguments()))
    for name, value in (("_source", lambda: "another"), ("_surroundings", lambda device: ["another card"])):
        forget()
        with monkeypatch.context() as patch:
            patch.setattr(programs, name, value)
            traced = Traced()
            check(traced.program()(*arguments()))
            assert traced.traces == 1


def test_a_program_of_a_home_that_cannot_be_written_is_loaded(on_disk, monkeypatch):
    check(Traced().program()(*arguments()))
    forget()

    def read_only(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(programs.Path, "touch", read_only)
    traced = Traced()
    check(traced.program()(*arguments()))
    assert traced.traces == 0


@pytest.mark.parametrize("which", ["msrm-programs", "."])
def test_nothing_is_read_or_written_where_others_can_write(on_disk, which):
    check(Traced().program()(*arguments()))
    (on_disk.parent / which).resolve().chmod(0o770)
    forget()
    traced = Traced()
    check(traced.program()(*arguments()))
    check(traced.program("other")(*arguments()))
    assert traced.traces == 2
    assert len(list(on_disk.iterdir())) == 1


def test_what_another_user_put_there_is_not_run(on_disk, monkeypatch):
    check(Traced().program()(*arguments()))
    forget()
    monkeypatch.setattr(folders.os, "getuid", lambda: 12345)
    traced = Traced()
    check(traced.program()(*arguments()))
    assert traced.traces == 1


def test_nothing_is_kept_when_jax_keeps_nothing(on_disk):
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        check(Traced().program()(*arguments()))
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
    assert not on_disk.exists()


def test_a_folder_that_cannot_be_written_costs_a_compilation_only(on_disk, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(programs, "replacing", full)
    check(Traced().program()(*arguments()))
    assert not list(on_disk.iterdir())


def test_the_newest_files_are_kept_and_those_of_others(on_disk, monkeypatch):
    monkeypatch.setattr(programs, "_FILES", 3)
    on_disk.mkdir(mode=0o700)
    (on_disk / "thesis.txt").write_text("of somebody")
    for name in "abcde":
        check(Traced().program(name)(*arguments()))
    assert (on_disk / "thesis.txt").exists()
    assert len(list(on_disk.iterdir())) == 4
    forget()
    last = Traced()
    check(last.program("e")(*arguments()))
    assert last.traces == 0


def test_a_process_keeps_so_many(monkeypatch):
    monkeypatch.setattr(programs, "_KEPT", 2)
    traced = Traced()
    for name in "abcab":
        check(traced.program(name)(*arguments()))
    assert traced.traces == 5
    check(traced.program("b")(*arguments()))
    assert traced.traces == 5
