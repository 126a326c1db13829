"""Traced factorizations: values, first and second derivatives, NaN on failure, and callbacks that cannot hang."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrm.gp import jax_cholesky
from msrm.gp.cholesky import DIAGNOSTICS
from msrm.gp.jax_cholesky import cholesky, diagnose, guard, log_determinant, log_determinant_and_solve, solve

# Below and above the order from which the CPU platform leaves XLA for LAPACK.
ORDERS = [1, 7, 300]


def problem(order: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A well-conditioned matrix, a symmetric direction and two right-hand sides."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((order, 2 * order + 2))
    direction = rng.standard_normal((order, order))
    return root @ root.T / order, direction + direction.T, rng.standard_normal((order, 2))


@pytest.mark.parametrize("order", ORDERS)
def test_values_agree_with_numpy(order):
    matrix, _, right = problem(order)
    log_det, x = jax.jit(log_determinant_and_solve)(matrix, right)
    np.testing.assert_allclose(log_det, np.linalg.slogdet(matrix)[1], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(x, np.linalg.solve(matrix, right), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(cholesky(matrix), np.linalg.cholesky(matrix), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(solve(matrix, right), x, rtol=0, atol=0)


@pytest.mark.parametrize("order", ORDERS)
def test_gradient_agrees_with_the_closed_form(order):
    matrix, _, right = problem(order)

    def value(a, b):
        log_det, x = log_determinant_and_solve(a, b)
        return 0.5 * log_det + (b * x).sum()

    by_matrix, by_right = jax.jit(jax.grad(value, argnums=(0, 1)))(matrix, right)
    inverse = np.linalg.inv(matrix)
    x = inverse @ right
    np.testing.assert_allclose(by_matrix, 0.5 * inverse - x @ x.T, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(by_right, 2 * x, rtol=1e-9, atol=1e-11)


def scalar(function, matrix, direction, right):
    """t -> a scalar of the factorization of a matrix that is quadratic in t."""

    def value(t):
        moved = matrix + t * direction + t * t * jnp.eye(len(matrix))
        if function is cholesky:
            return jnp.sin(cholesky(moved)).sum()
        if function is log_determinant:
            return log_determinant(moved)
        return (jnp.sin(solve(moved, right + t)) ** 2).sum()

    return value


CASES = [(solve, 3)] + [
    pytest.param(function, order, marks=pytest.mark.slow)
    for function, order in ((cholesky, 3), (log_determinant, 3), (cholesky, 260), (log_determinant, 260), (solve, 260))
]


@pytest.mark.parametrize(("function", "order"), CASES)
def test_two_derivatives_in_every_mode(function, order):
    matrix, direction, right = problem(order)
    value = jax.jit(scalar(function, matrix, 0.1 * direction / order, right))
    # Five-point differences: truncation h^4, rounding 1e-16/h and 1e-16/h^2 relative to the value.
    at = {h: float(value(h)) for h in (-2e-2, -1e-2, 0.0, 1e-2, 2e-2)}
    first = (at[-2e-2] - 8 * at[-1e-2] + 8 * at[1e-2] - at[2e-2]) / 12e-2
    second = (-at[-2e-2] + 16 * at[-1e-2] - 30 * at[0.0] + 16 * at[1e-2] - at[2e-2]) / 12e-4
    size = abs(at[0.0]) + 1
    for derivative in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(jax.jit(derivative(value))(0.0), first, rtol=1e-5, atol=1e-7 * size)
    values = [jax.jit(outer(jax.grad(value)))(0.0) for outer in (jax.grad, jax.jacfwd)]
    np.testing.assert_allclose(values, values[0], rtol=1e-9, atol=1e-11 * size)
    np.testing.assert_allclose(values[0], second, rtol=1e-4, atol=1e-6 * size)


def test_hessian_through_the_host_agrees_with_the_native_one(monkeypatch):
    monkeypatch.setattr(jax_cholesky, "_HOST_ORDER", 1)
    matrix, _, right = problem(4, seed=3)

    def ours(entries):
        log_det, x = log_determinant_and_solve(matrix + entries + entries.T, right)
        return log_det + (x**3).sum()

    def native(entries):
        moved = matrix + entries + entries.T
        factor = jax.scipy.linalg.cho_factor(moved, lower=True)
        return 2 * jnp.log(jnp.diagonal(factor[0])).sum() + (jax.scipy.linalg.cho_solve(factor, right) ** 3).sum()

    zero = jnp.zeros((4, 4))
    expected = np.asarray(jax.jit(jax.hessian(native))(zero))
    np.testing.assert_allclose(jax.jit(jax.hessian(ours))(zero), expected, rtol=1e-9, atol=1e-10 * abs(expected).max())


@pytest.mark.parametrize("order", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_batches_agree_with_single_matrices(order):
    matrices = np.stack([problem(order, seed)[0] for seed in range(3)])
    singly = [float(log_determinant(matrix)) for matrix in matrices]
    np.testing.assert_allclose(log_determinant(matrices), singly, rtol=1e-13)
    np.testing.assert_allclose(jax.vmap(log_determinant)(matrices), singly, rtol=1e-13)
    gradients = jax.jit(jax.vmap(jax.grad(log_determinant)))(matrices)
    np.testing.assert_allclose(gradients, np.linalg.inv(matrices), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("order", [6, 300])
def test_failures_are_nan_and_named(order):
    matrix, _, right = problem(order)
    indefinite, missing = matrix - 100 * np.eye(order), matrix.copy()
    missing[1, 2] = missing[2, 1] = np.nan
    gradient = jax.jit(jax.grad(log_determinant))
    infinite = matrix + np.diag([np.inf] + [0.0] * (order - 1))
    for broken, status in ((matrix, 0), (missing, 1), (infinite, 1), (indefinite, 2)):
        lower = cholesky(broken)
        assert int(diagnose(broken, lower)) == status
        assert np.isnan(lower).all() == (status > 0)
        log_det, x = log_determinant_and_solve(broken, right)
        assert np.isnan(log_det) == (status > 0)
        assert np.isnan(x).all() == (status > 0)
        assert np.isnan(gradient(broken)).all() == (status > 0)
    assert [text.split(";")[0] for text in DIAGNOSTICS] == ["", "not finite", "not positive definite"]
    # One broken matrix of a stack leaves the others alone.
    both = log_determinant(np.stack([matrix, indefinite]))
    assert np.isfinite(both[0])
    assert np.isnan(both[1])


def test_float32_and_rectangles_are_refused():
    with pytest.raises(TypeError, match="needs float64, found float32"):
        cholesky(jnp.eye(3, dtype=jnp.float32))
    with pytest.raises(ValueError, match=r"found shape \(3, 2\)"):
        log_determinant(jnp.ones((3, 2)))


def test_guard_asks_the_device(monkeypatch):
    guard(100, copies=5)
    with pytest.raises(MemoryError, match=r"order 40,000 is above 32,768.*statespace"):
        guard(40_000, copies=1)
    monkeypatch.setattr(jax_cholesky, "device_memory", lambda device=None: (10**9, "cuda:0 (NVIDIA H200)"))
    with pytest.raises(MemoryError, match=r"cuda:0 \(NVIDIA H200\) has 1.00 GB left.*statespace"):
        guard(20_000, copies=3)
    monkeypatch.setattr(jax_cholesky.jax, "default_backend", lambda: "gpu")
    with pytest.raises(MemoryError, match="order 46,341 is above 46,340"):
        guard(46_341, copies=1)


def test_device_memory_of_an_accelerator():
    class Device:
        platform, device_kind = "gpu", "NVIDIA H200"

        def memory_stats(self):
            return {"bytes_limit": 100, "bytes_in_use": 30}

        def __str__(self):
            return "cuda:0"

    assert jax_cholesky.device_memory(Device()) == (70, "cuda:0 (NVIDIA H200)")
    assert jax_cholesky.device_memory()[1] == "the host"


CALLBACKS = """
import os, threading
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, numpy as np
from msrm.gp.jax_cholesky import log_determinant

base = jnp.eye(300) * 3 + 0.1
value = jax.value_and_grad(lambda t: log_determinant(base * jnp.exp(t)))
chain = jax.jit(lambda t: jax.lax.scan(lambda c, _: (c + 1e-3 * value(c)[1], value(c)[0]), t, None, length=5)[0])
vectorized = jax.jit(jax.vmap(chain))(jnp.arange(4.0))
parallel = jax.pmap(chain)(jnp.arange(4.0))
results = {}
threads = [threading.Thread(target=lambda i=i: results.update({i: float(chain(1.0 * i))})) for i in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
np.testing.assert_allclose(vectorized, parallel, rtol=1e-12)
np.testing.assert_allclose(vectorized, [results[i] for i in range(4)], rtol=1e-12)
print("done")
"""


def test_callbacks_do_not_deadlock_on_one_core():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    # The hard limit is the test: a deadlock never ends, the work itself takes a few seconds.
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", CALLBACKS],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "done"


def test_x64_and_precision_are_on():
    assert jnp.zeros(1).dtype == jnp.float64
    assert jax.config.jax_default_matmul_precision == "highest"


def test_callbacks_see_numpy_only(monkeypatch):
    seen = []
    monkeypatch.setattr(jax_cholesky, "lower_factor", lambda a: (seen.append(type(a)) or np.linalg.cholesky(a), ""))
    jax.jit(lambda a: cholesky(a) + 0)(np.eye(257)).block_until_ready()
    assert seen == [np.ndarray]
