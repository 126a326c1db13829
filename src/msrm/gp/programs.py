"""Compiled functions that are kept: for this process, and on disk for the next one (DESIGN 4, 8).

JAX's own cache keeps what XLA made, and finds it by tracing and lowering the function again: one to six seconds of
Python for a likelihood or a sweep. A `Program` is found by what it was *made of* instead: the objects that its trace
follows from, the shapes of its arguments, this package's source, the versions, the device and JAX's settings. Nothing
is traced to find it. More than a trace needs may be named, at the cost of a compilation; less may not.

Files lie beside JAX's, in a folder that nobody else may write: what lies there is run as code.
"""

import hashlib
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

import msrm
from msrm.gp.jax_settings import compiler_options
from msrm.runtime.facts import versions
from msrm.runtime.folders import whose_else
from msrm.sealed import replacing

__all__ = ["Program", "fingerprint"]

_KEPT = 32  # in a process
_FILES = 64
_FOLDER = "msrm-programs"
_NAME = re.compile("[0-9a-f]{64}")
_KNOWN = ("builtins", "numpy", "jax", "jaxlib", "msrm")  # whose classes hold what is read here, and no more
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_debug_nans",
)
# A CPU's program holds addresses of LAPACK and of Python callbacks, which are another process's.
_PLATFORMS = ("gpu",)
_ready: OrderedDict[str, tuple[Any, Any]] = OrderedDict()
_lock = Lock()


def fingerprint(value: Any) -> str:
    """Digest of what plain objects, arrays, mappings and dataclasses hold, in their order.

    Raises
    ------
    TypeError
        For an object whose contents are not known to be all of it.
    """
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    kind = type(value)
    # The same name may be another class in the next process, or in the next cell of a notebook.
    if kind.__module__.split(".")[0] not in _KNOWN or isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"the contents of a {kind.__qualname__} are not known")
    digest.update(f"<{kind.__module__}.{kind.__qualname__}".encode())
    if isinstance(value, str | int | float | complex | bool | bytes | None):
        digest.update(repr(value).encode())
    elif isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError("the contents of an array of objects are not known")
        digest.update(f"{array.dtype!r}{array.shape}".encode())
        digest.update(array.tobytes())
    elif is_dataclass(kind):
        for field in fields(value):
            _feed(digest, field.name)
            _feed(digest, getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _feed(digest, key)
            _feed(digest, one)
    elif isinstance(value, list | tuple):
        for one in value:
            _feed(digest, one)
    elif isinstance(value, slice):
        _feed(digest, (value.start, value.stop, value.step))
    elif isinstance(value, frozenset | set):
        for one in sorted(map(fingerprint, value)):
            _feed(digest, one)
    else:
        raise TypeError(f"the contents of a {kind.__qualname__} are not known")
    digest.update(b">")


class Program:
    """A pure function of pytrees of arrays, compiled once for each shape of its arguments.

    Parameters
    ----------
    function : callable
    made_of : object
        All that its trace follows from beside the shapes of its arguments, as :func:`fingerprint` takes it; None, or
        parts whose contents are not known, for a function that is compiled for this object alone.
    """

    def __init__(self, function: Callable[..., Any], made_of: Any) -> None:
        self._function = function
        self._identity: str | None = None
        if made_of is not None:
            with suppress(TypeError):
                plain = getattr(function, "func", function)  # of a partial
                self._identity = fingerprint([f"{plain.__module__}.{plain.__qualname__}", made_of])
        self._compiled: dict[Any, tuple[Any, Any]] = {}

    @property
    def count(self) -> int:
        """How many shapes of its arguments it was compiled for."""
        return len(self._compiled)

    def __call__(self, *arguments: Any) -> Any:
        """The function's result on JAX's default device."""
        if jax.config.jax_disable_jit:
            return self._function(*arguments)
        leaves, tree = jax.tree.flatten(arguments)
        shapes = tuple((np.shape(leaf), getattr(leaf, "dtype", None) or np.result_type(leaf)) for leaf in leaves)
        device, settings = _device(), tuple(getattr(jax.config, name) for name in _SETTINGS)
        key = tree, shapes, device, settings
        if (found := self._compiled.get(key)) is None:
            found = self._compiled[key] = self._made(tree, shapes, device, settings)
        compiled, structure = found
        return jax.tree.unflatten(structure, compiled(*leaves))

    def lower(self, *arguments: Any) -> Any:
        """The function lowered anew, as of `jax.jit`."""
        return jax.jit(self._function, compiler_options=compiler_options()).lower(*arguments)

    def _made(self, tree: Any, shapes: Any, device: Any, settings: tuple[Any, ...]) -> tuple[Any, Any]:
        if self._identity is None:
            compiled, structure = self._build(tree, shapes)
            return compiled, jax.tree.structure(structure)
        key = fingerprint([self._identity, str(tree), str(shapes), str(settings), *_surroundings(device)])
        found = _ready.get(key)
        if found is None:
            path = _path(key, device)
            made = None if path is None else _read(path, device, len(shapes))
            if made is None:
                made = self._build(tree, shapes)
                if path is not None:
                    _write(path, *made)
            found = made[0], jax.tree.structure(made[1])
        with _lock:
            _ready[key] = found
            _ready.move_to_end(key)
            while len(_ready) > _KEPT:
                _ready.popitem(last=False)
        return found

    def _build(self, tree: Any, shapes: Any) -> tuple[Any, Any]:
        """Compiled for flat arguments, and the structure of its results."""
        structure: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            out, of = jax.tree.flatten(self._function(*jax.tree.unflatten(tree, leaves)))
            structure.append(jax.tree.unflatten(of, range(len(out))))
            return out

        given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
        compiled = jax.jit(flat, compiler_options=compiler_options()).lower(*given).compile()
        return compiled, structure[-1]


def _device() -> Any:
    device = jax.config.jax_default_device
    return device if isinstance(device, jax.Device) else jax.devices(device)[0]


def _surroundings(device: Any) -> list[str]:
    """What else a compilation depends on."""
    flags = [str(os.environ.get("XLA_FLAGS")), str(compiler_options())]
    return [_source(), *flags, device.platform, device.device_kind, str(device.id), device.client.platform_version]


@cache
def _source() -> str:
    """Digest of this package's source and of the versions beside it."""
    digest = hashlib.sha256(str(versions()).encode())
    for path in sorted(Path(msrm.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_source()  # now, while files are what was imported


def _path(key: str, device: Any) -> Path | None:
    """Where a program lies on disk; None where none are kept, elsewhere, or where others can write."""
    kept = jax.config.jax_compilation_cache_dir
    if not kept or not jax.config.jax_enable_compilation_cache or device.platform not in _PLATFORMS or "://" in kept:
        return None
    folder = Path(kept) / _FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return None if whose_else(folder) or whose_else(folder.parent) else folder / key
    except OSError:
        return None


def _read(path: Path, device: Any, count: int) -> tuple[Any, Any] | None:
    """The program of a file, of so many flat arguments; None where there is none that can be loaded."""
    try:
        payload, structure = pickle.loads(path.read_bytes())
        trees = jax.tree.structure((tuple(range(count)), {})), jax.tree.structure(jax.tree.leaves(structure))
        loaded = serialize_executable.deserialize_and_load(
            payload, *trees, backend=device.client, execution_devices=[device]
        )
    except Exception:  # of another version, cut short, or no longer loadable: it is compiled again
        return None
    with suppress(OSError):
        path.touch()
    return loaded, structure


def _write(path: Path, compiled: Any, structure: Any) -> None:
    """Keep a program, and the newest others."""
    # A full disk, or a backend that cannot be asked for its code, costs the next process a compilation.
    with suppress(Exception):
        payload, *_ = serialize_executable.serialize(compiled)
        with replacing(path) as aside:
            aside.write_bytes(pickle.dumps((payload, structure)))
        ours = [one for one in path.parent.iterdir() if _NAME.fullmatch(one.name)]
        by_age = sorted(ours, key=lambda one: one.stat().st_mtime)
        for old in by_age[:-_FILES]:
            old.unlink(missing_ok=True)
