"""Time the compiled likelihoods on a GPU, section by section, into one JSON file that is written after every figure.

    python benchmarks/cuda.py --out benchmarks/cuda.json                      # everything, on the GPU
    python benchmarks/cuda.py --platform cpu --small --out /tmp/cuda.json     # a rehearsal anywhere
    python benchmarks/cuda.py --sections likelihood dense --seconds 240       # some of it, within a time

Sections: `likelihood` (whole log likelihood and gradient by features and length), `evaluation` (the same as fits make
it, sums on the host), `profile` (a gradient's kernels), `dense` (gradient against the raw factorization), `kernels`
(what a level of cyclic reduction is made of), `tuning` (settings of the block solver), `cache` (second start of a
process with JAX's persistent compilation cache), `memory` (the largest dense order), `fits` (whole MAPs beside the
CPU's), `chains` (vectorized), `flags` (XLA's own settings), `blocks` (the table of DESIGN 7). Times are medians after a
warm-up; compilation is apart. Recordings are those of `msrm.simulate`, which are the workload's shape.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

Record = dict[str, Any]
SECTIONS = (
    "likelihood",
    "evaluation",
    "profile",
    "dense",
    "kernels",
    "tuning",
    "cache",
    "memory",
    "fits",
    "chains",
    "flags",
    "blocks",
)
SHAPES = ((66, 47), (114, 54), (162, 57), (162, 457))  # order and number of blocks, DESIGN 7


class Report:
    """Figures, on disk after every one; stops taking more when the time is over."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.end, self.figures = path, time.monotonic() + seconds, {}

    def add(self, section: str, name: str, make: Callable[[], Any]) -> None:
        """The figure that `make` returns, or why there is none."""
        if time.monotonic() > self.end:
            found: Any = {"skipped": "the time was over"}
        else:
            try:
                found = make()
            except Exception as problem:  # one figure that cannot be had must not cost the others
                found = {"failed": f"{type(problem).__name__}: {problem}"[:400]}
        self.figures.setdefault(section, {})[name] = found
        print(section, name, json.dumps(found), flush=True)
        self.path.write_text(json.dumps(self.figures, indent=1) + "\n")


def timed(function: Callable[..., Any], *arguments: Any, repeats: int = 20) -> Record:
    """Compile time and median warm time of a function of arrays, milliseconds."""
    import jax

    start = time.perf_counter()
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    compiled = jitted.lower(*arguments).compile()
    built = time.perf_counter() - start
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - start)
    # What one dispatch hides: calls queued behind each other.
    start = time.perf_counter()
    for _ in range(repeats):
        out = compiled(*arguments)
    jax.block_until_ready(out)
    queued = (time.perf_counter() - start) / repeats
    found = {"ms": 1e3 * median(times), "least_ms": 1e3 * min(times), "queued_ms": 1e3 * queued, "compile_s": built}
    memory = compiled.memory_analysis()
    return found | ({} if memory is None else {"temporary_mb": memory.temp_size_in_bytes / 1e6})


def block_system(order: int, count: int) -> tuple[Any, Any, Any]:
    """A well-conditioned chain."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 3)
    noise = jax.random.normal(keys[0], (count, order, order)) / order**0.5
    diagonal = 4.0 * jnp.eye(order) + 0.25 * (noise + jnp.swapaxes(noise, 1, 2))
    lower = 0.5 * jax.random.normal(keys[1], (count - 1, order, order)) / order**0.5
    return diagonal, lower, jax.random.normal(keys[2], (count, order))


def kernels(small: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Batched factorization, triangular inverse, products: the parts of a level, by batch."""
    import jax.numpy as jnp
    from jax.scipy.linalg import solve_triangular

    from msrm.gp.blocks import inverse_factor
    from msrm.gp.jax_cholesky import cholesky

    order = 24 if small else 144
    for batch in (1, 16) if small else (1, 22):
        matrix = block_system(order, batch + 1)[0][:batch]
        wide = jnp.concatenate([matrix, matrix], -1)
        name = f"order {order} batch {batch}"
        yield f"cholesky {name}", lambda m=matrix: timed(cholesky, m)
        identity = jnp.broadcast_to(jnp.eye(order), matrix.shape)
        yield (
            f"triangular inverse {name}",
            lambda m=matrix, i=identity: timed(lambda a, b: solve_triangular(a, b, lower=True), m, i),
        )
        yield f"gram of [A A] {name}", lambda w=wide: timed(lambda a: jnp.swapaxes(a, 1, 2) @ a, w)
        for leaf, triangle in ((None, 18), (None, 36), (72, None), (36, None), (72, 18), (24, None)):
            yield (
                f"inverse factor leaf {leaf} triangle {triangle} {name}",
                lambda m=matrix, q=leaf, t=triangle: timed(lambda a: inverse_factor(a, q, t), m),
            )


def solver_figures(solver: Any, order: int, count: int) -> Record:
    """Value, and value and gradient, of a block log evidence."""
    import jax

    from msrm.gp.blocks import log_evidence

    system = block_system(order, count)
    value = timed(lambda *a: log_evidence(solver, *a), *system)
    gradient = timed(jax.value_and_grad(lambda *a: log_evidence(solver, *a), argnums=(0, 1, 2)), *system)
    return {"value": value, "gradient": gradient}


def blocks(small: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The table of DESIGN 7, and one sequential scan beside it."""
    from msrm.gp.blocks import Sequential
    from msrm.gp.cyclic import Parallel

    shapes = ((12, 9), (12, 33)) if small else SHAPES
    for order, count in shapes:
        yield f"parallel order {order} blocks {count}", lambda o=order, n=count: solver_figures(Parallel(), o, n)
    order, count = shapes[-2]
    yield f"sequential order {order} blocks {count}", lambda: solver_figures(Sequential(), order, count)


def prepared(features: int, seconds: float, likelihood: str, step: float, coarse: float | None) -> tuple[Any, Any]:
    """Likelihood in rotated features at a spacing, or extrapolated from two, and the truth in its coordinates."""
    import numpy as np

    import msrm
    from msrm.gp.extrapolation import Extrapolated
    from msrm.gp.model import GPDensity

    recording, truth = msrm.simulate(features=features, seconds=seconds)
    responses = {
        "brain": msrm.Identity(),
        "rating": msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.5, 1.5))),
        "physiology": msrm.Gaussian(
            width=msrm.Free(0.6, bounds=(0.3, 1.5)), lag=msrm.Free(0.5, bounds=(-1.0, 2.0))
        ),
    }  # fmt: skip
    density = GPDensity(3, responses, edges="trim", likelihood=likelihood, device="cpu")
    made = density.prepared(recording, reduce=True)[0]
    if likelihood == "statespace":
        fine = made.backend.at_step(step)
        made = made.with_backend(fine if coarse is None else Extrapolated(fine.at_step(coarse), fine))
    parameters = {}
    for pair in made.nodes.pairs:
        name = f"{pair.participant}/{pair.modality}"
        rows = np.column_stack([truth.parameters[f"{kind}/{name}"] for kind in ("loading", "offset")])
        rows = rows if pair.reduced is None else pair.reduced.to_reduced(rows)
        parameters[f"loading/{name}"], parameters[f"offset/{name}"] = rows[:, :-1], rows[:, -1]
        parameters[f"noise/{name}"] = np.asarray(float(truth.parameters[f"noise/{name}"]))
    parameters |= {
        "response/rating/lag": np.array(0.4),
        "response/physiology/lag": np.array(1.0),
        "response/physiology/width": np.array(0.8),
    }
    return made, parameters


def whole(features: int, seconds: float, step: float, coarse: float | None, solver: Any, *, check: bool) -> Record:
    """Whole log likelihood and gradient on the device; ``check`` them against NumPy's, and measure their error."""
    from msrm.gp.extrapolation import Extrapolated
    from msrm.gp.jax_backend import NativeLikelihood

    likelihood, parameters = prepared(features, seconds, "statespace", step, coarse)
    native = NativeLikelihood(likelihood, parameters=parameters, room=1.0, solver=solver)
    arrays = native._packed(parameters)
    made = timed(native._compiled[1], native.data, arrays)
    record = {
        "gradient": made,
        "steps_s": [step] if coarse is None else [step, coarse],
        "block_order": native.chain.order,
        "blocks": native.chain.chain.count,
    }
    if not check:
        return record
    start = time.perf_counter()
    expected, slopes = likelihood.value_and_gradient(parameters)
    host = time.perf_counter() - start
    found, ours = native.value_and_gradient(parameters)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        native.value_and_gradient(parameters)
        times.append(1e3 * (time.perf_counter() - start))
    size = max(abs(slope).max() for slope in slopes.values())
    backend = getattr(likelihood.backend, "fine", likelihood.backend)
    limit = likelihood.with_backend(Extrapolated(backend.at_step(step), backend.at_step(0.5 * step))).value(parameters)
    return record | {
        "from_and_to_the_host_ms": median(times),
        "numpy_host_s": host,
        "log_likelihood": float(found),
        "error_nats": abs(float(found) - limit),
        "relative_difference": abs(float(found) / expected - 1.0),
        "gradient_difference": max(float(abs(ours[name] - slopes[name]).max()) for name in slopes) / float(size),
    }


LENGTH = 453.6
CASES = (
    (360, 1, 0.45, None), (3600, 1, 0.45, None), (360, 2, 0.6, 0.9), (360, 4, 0.45, 0.6), (360, 32, 0.45, 0.6),
)  # fmt: skip


def likelihood(small: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """By features, spacing and length: the table of issue 5."""
    for features, times, step, coarse in ((6, 0.2, 0.9, None), (6, 0.2, 0.9, 1.8)) if small else CASES:
        name = f"features {features}, {times} x, step {step}" + ("" if coarse is None else f" and {coarse}")
        arguments = features, times * LENGTH, step, coarse
        yield name, lambda a=arguments: whole(*a, "parallel", check=True)


def tuning(small: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Settings of cyclic reduction on the whole gradient."""
    from msrm.gp.cyclic import Parallel

    settings = [
        Parallel(), Parallel(triangle=18), Parallel(leaf=72), Parallel(leaf=36),
        Parallel(leaf=72, triangle=18), Parallel(root=1), Parallel(root=7),
    ]  # fmt: skip
    arguments = (6, 0.2 * LENGTH, 0.9, None) if small else (360, LENGTH, 0.45, None)
    for solver in settings[:2] if small else settings:
        yield f"{solver}", lambda s=solver: whole(*arguments, s, check=False)


def profile(small: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Kernels of one gradient: how many, how long each kind takes, how long the device waits."""

    def figure(arguments: tuple[Any, ...]) -> Record:
        import jax
        from jax.profiler import ProfileData

        from msrm.gp.jax_backend import NativeLikelihood

        made, parameters = prepared(arguments[0], arguments[1], "statespace", *arguments[2:])
        native = NativeLikelihood(made, parameters=parameters, room=1.0)
        arrays = native._packed(parameters)
        compiled = native._compiled[1].lower(native.data, arrays).compile()
        jax.block_until_ready(compiled(native.data, arrays))
        calls = 4
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(calls):
                    jax.block_until_ready(compiled(native.data, arrays))
            trace = next(Path(folder).rglob("*.xplane.pb"))
            lines: dict[str, dict[str, list[float]]] = {}
            for plane in ProfileData.from_file(str(trace)).planes:
                for line in plane.lines:
                    events = lines.setdefault(f"{plane.name} | {line.name}", {})
                    for event in line.events:
                        events.setdefault(event.name[:70], []).append(event.duration_ns / 1e3)
        found = {}
        for name, events in lines.items():
            ordered = sorted(events.items(), key=lambda one: -sum(one[1]))
            total, count = sum(map(sum, events.values())), sum(map(len, events.values()))
            each = {key: [len(took) / calls, sum(took) / calls] for key, took in ordered[:40]}
            found[name] = {"us_a_call": total / calls, "events_a_call": count / calls, "largest": each}
        text = compiled.as_text()
        kinds = {kind: text.count(f" {kind}(") for kind in ("fusion", "custom-call", "while", "copy", "call")}
        return {"lines": found, "instructions": kinds}

    yield "gradient", lambda: figure((6, 0.2 * LENGTH, 0.9, None) if small else (360, LENGTH, 0.45, None))


def dense(small: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Log evidence and gradient at the recorded dimension, whole and by panels, and the raw factorization beside it."""
    import jax
    import jax.numpy as jnp

    from msrm.gp.jax_cholesky import cholesky, factor_inverse
    from msrm.gp.jax_dense import dense_evidence, dense_evidence_by_panels

    for nodes in (40,) if small else (910, 1820):
        keys = jax.random.split(jax.random.key(0), 2)
        times = jnp.linspace(0.0, 0.5 * nodes, nodes)
        lags = abs(times[:, None] - times) * 3**0.5 / 3.0
        loadings = jax.random.normal(keys[0], (nodes, 30, 3))
        given = (
            (1 + lags) * jnp.exp(-lags),
            jnp.einsum("jfk,jfl->jkl", loadings, loadings),
            jax.random.normal(keys[1], (nodes, 3)),
        )
        matrix = jnp.kron(given[0], jnp.eye(3)) + jnp.eye(3 * nodes)
        name = f"dimension {3 * nodes}"
        yield f"raw cholesky and inverse, {name}", lambda m=matrix: timed(lambda a: factor_inverse(cholesky(a)), m)
        yield f"value, {name}", lambda g=given: timed(dense_evidence, *g)
        gradient = jax.value_and_grad(dense_evidence, argnums=(0, 1, 2))
        yield f"value and gradient, {name}", lambda g=given, f=gradient: timed(f, *g)
        panel = min(512, nodes)
        yield f"by panels, {name}", lambda g=given, p=panel: timed(lambda *a: dense_evidence_by_panels(*a, panel=p), *g)

    def backend() -> Record:
        from msrm.gp.native_dense import NativeDense

        made, parameters = prepared(6 if small else 360, 72.0 if small else LENGTH, "dense", 0.9, None)
        native = made.with_backend(NativeDense(made.backend))
        times, found = [], (0.0, {})
        for _ in range(6):
            start = time.perf_counter()
            found = native.value_and_gradient(parameters)
            times.append(1e3 * (time.perf_counter() - start))
        expected = made.value(parameters)
        return {"ms": median(times[1:]), "first_ms": times[0], "relative_difference": abs(found[0] / expected - 1.0)}

    yield "whole likelihood, tables on the host", backend


def evaluation(small: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What a fit asks of the card: sums on the host, the log evidence of each run on the device."""

    def figure(seconds: float, step: float) -> Record:
        from msrm.gp.devices import evaluation_seconds, on_device

        made, parameters = prepared(6 if small else 360, seconds, "statespace", step, None)
        found = {"step_s": step, "estimated_on_one_core_ms": 1e3 * evaluation_seconds(made.backend)}
        for name, likelihood in (("host", made), ("device", made.with_backend(on_device(made.backend)))):
            times = []
            for _ in range(8):
                start = time.perf_counter()
                likelihood.value_and_gradient(parameters)
                times.append(1e3 * (time.perf_counter() - start))
            found |= {f"{name}_first_ms": times[0], f"{name}_ms": median(times[1:])}
        return found

    for times in (0.2,) if small else (1, 4):
        yield f"{times} x", lambda t=times: figure(t * LENGTH, 0.9 if small else 0.45)


def fits(small: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A whole MAP on the CPU and on the card, by length: compiled within it, and again."""

    def figure(times: float, devices: tuple[str, ...]) -> Record:
        from ours import gp

        import msrm

        recording, _ = msrm.simulate(features=6 if small else 360, seconds=times * LENGTH)
        found: Record = {}
        for device in devices:
            settings = {"likelihood": "statespace", "n_starts": 1, "progress": False}
            model = gp(**settings, device="cpu" if small else device)
            for which in ("first_s", "again_s") if device == "cuda" else ("s",):
                start = time.perf_counter()
                model.fit(recording)
                found[f"{device}_{which}"] = time.perf_counter() - start
            found |= {f"{device}_objective": model.objective_, f"{device}_error": model.likelihood_error_}
        return found

    for times in (0.2,) if small else (1, 8, 32):
        devices = ("cuda",) if times == 32 else ("cpu", "cuda")  # a CPU takes minutes for the longest
        yield f"{times} x", lambda t=times, d=devices: figure(t, d)


def chains(small: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Gradients of several chains at once."""
    import jax
    import jax.numpy as jnp

    from msrm.gp.jax_backend import NativeLikelihood

    def figure(count: int) -> Record:
        made, parameters = prepared(
            6 if small else 360, 72.0 if small else LENGTH, "statespace", 0.9 if small else 0.45, None
        )
        native = NativeLikelihood(made, parameters=parameters, room=1.0)
        stacked = {name: jnp.stack([jnp.asarray(value)] * count) for name, value in parameters.items()}
        gradient = jax.vmap(jax.value_and_grad(native.log_likelihood, argnums=1), in_axes=(None, 0))
        return timed(gradient, native.data, stacked)

    for count in (2,) if small else (4, 16):
        yield f"{count} chains", lambda c=count: figure(c)


def memory(small: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What the guard allows on this device, and that it refuses one more."""
    from msrm.gp.jax_cholesky import device_memory, guard

    def figure() -> Record:
        available, where = device_memory()
        allowed, refused = 1, 100_000
        message = ""
        while refused - allowed > 1:
            order = (allowed + refused) // 2
            try:
                guard(order, copies=3.5)
                allowed = order
            except MemoryError as problem:
                refused, message = order, str(problem)
        return {"available_gb": (available or 0) / 1e9, "where": where, "largest_order": allowed, "message": message}

    yield "dense by panels", figure


COLD = """
import time; start = time.perf_counter()
import sys; sys.path.insert(0, {folder!r})
import jax; jax.config.update("jax_compilation_cache_dir", {cache!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
import warnings; warnings.simplefilter("ignore")
import cuda
from msrm.gp.jax_backend import NativeLikelihood
likelihood, parameters = cuda.prepared({features}, {seconds}, "statespace", {step}, None)
ready = time.perf_counter()
native = NativeLikelihood(likelihood, parameters=parameters, room=1.0)
native.value_and_gradient(parameters)
first = time.perf_counter() - ready
times = []
for _ in range(20):
    begin = time.perf_counter()
    native.value_and_gradient(parameters)
    times.append(time.perf_counter() - begin)
print(ready - start, first, sorted(times)[10])
"""


def child(cache: str, small: bool, **environment: str) -> list[float]:
    """Seconds until data are there, for the first gradient and for a later one, in a process of its own."""
    code = COLD.format(
        folder=str(Path(__file__).parent),
        cache=cache,
        features=6 if small else 360,
        seconds=72.0 if small else LENGTH,
        step=0.9 if small else 0.45,
    )
    # This process holds part of the card; children take what they need.
    given = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=200, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    return [float(part) for part in done.stdout.split()[-3:]]


def cache(small: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A process that compiles and one that finds everything in the persistent cache."""

    def figure() -> Record:
        with tempfile.TemporaryDirectory() as folder:
            first, second = child(folder, small), child(folder, small)
        return {"import_and_data_s": first[0], "first_gradient_s": first[1], "second_start_gradient_s": second[1]}

    yield "first gradient of a process", figure


def flags(small: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What XLA's own settings change."""
    for given in (
        "--xla_gpu_autotune_level=0",
        "--xla_gpu_enable_command_buffer=",
        "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION",
    )[: 1 if small else 3]:

        def figure(given: str = given) -> Record:
            with tempfile.TemporaryDirectory() as folder:
                _, first, later = child(folder, small, XLA_FLAGS="" if small else given)
            return {"first_gradient_s": first, "from_and_to_the_host_ms": 1e3 * later}

        yield given, figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes that take seconds, to rehearse")
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no figure after this time")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu" if arguments.platform == "cpu" else "cuda,cpu"
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.8")
    import warnings

    import jax

    from msrm import runtime
    from msrm.gp import jax_settings  # noqa: F401  float64 before the first array

    warnings.simplefilter("ignore")
    if arguments.platform == "cuda" and jax.default_backend() != "gpu":
        raise SystemExit(f"no GPU: JAX runs on {jax.default_backend()}. Use --platform cpu to rehearse.")
    report = Report(arguments.out, arguments.seconds)
    report.figures["runtime"] = json.loads(json.dumps(runtime.describe(), default=str))
    report.figures["arguments"] = {"small": arguments.small, "platform": arguments.platform}
    for section in arguments.sections:
        for name, make in globals()[section](arguments.small):
            report.add(section, name, make)


if __name__ == "__main__":
    main()
