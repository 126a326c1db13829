"""The guarded symmetric factorization in traced code, with derivative rules of every order (DESIGN 4).

On the CPU platform a matrix of order 256 or more leaves XLA for LAPACK (`msrm.gp.cholesky`) through a callback that
sees NumPy arrays only: XLA's own call runs LAPACK's threads against XLA's pool, and a callback handed JAX arrays can
deadlock on few cores. Smaller matrices, and every other platform, use XLA's native Cholesky. All rules are written
with functions of this module, so they differentiate again:

    d log det A = tr(A^-1 dA),  d(A^-1 b) = A^-1 (db - dA x),  dL = L Phi(L^-1 dA L^-T),  d A^-1 = -A^-1 dA A^-1
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.scipy.linalg import solve_triangular

from msrm.gp.cholesky import ACCELERATOR_ORDER, LAPACK_ORDER, check_order, host_memory, inverse_of_factor, lower_factor
from msrm.gp.jax_settings import FLOAT

__all__ = [
    "cholesky",
    "device_memory",
    "diagnose",
    "factor_inverse",
    "guard",
    "log_determinant",
    "log_determinant_and_solve",
    "solve",
    "solve_factor",
]

_HOST_ORDER = 256  # below it LAPACK starts no threads and a callback (50 us) costs more than the factorization


def device_memory(device: Any = None) -> tuple[int | None, str]:
    """Bytes that may still be allocated on a device, and its name.

    Parameters
    ----------
    device : jax.Device, optional
        The default device unless given.

    Returns
    -------
    available : int or None
        None where the device does not say.
    where : str
        Name for messages.
    """
    device = jax.local_devices()[0] if device is None else device
    if device.platform == "cpu":
        return host_memory(), "the host"
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None, str(device)
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0), f"{device} ({device.device_kind})"


def guard(order: int, *, copies: float) -> None:
    """Refuse a dense order that the default device cannot hold; call it before the matrix is traced.

    Raises
    ------
    MemoryError
        Naming the order, the bytes needed and had, and ``"statespace"``.
    """
    available, where = device_memory()
    largest = LAPACK_ORDER if jax.default_backend() == "cpu" else ACCELERATOR_ORDER
    check_order(order, copies=copies, largest=largest, available=available, where=where)


def _checked(matrix: Array) -> Array:
    matrix = jnp.asarray(matrix)
    if matrix.dtype != FLOAT:
        raise TypeError(f"a factorization needs float64, found {matrix.dtype}; convert before the matrix is formed")
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"a factorization needs square matrices, found shape {matrix.shape}")
    return matrix


def _transposed(matrix: Array) -> Array:
    return jnp.swapaxes(matrix, -1, -2)


# --- two primitives: LAPACK through a NumPy-only callback on the CPU platform, native code elsewhere ---


def _native_factor(matrix: Array) -> Array:
    lower = jax.lax.linalg.cholesky(matrix, symmetrize_input=False)
    ok = jnp.isfinite(matrix).all((-2, -1)) & jnp.isfinite(jnp.diagonal(lower, axis1=-2, axis2=-1)).all(-1)
    return jnp.where(ok[..., None, None], lower, jnp.nan)


def _native_inverse(lower: Array) -> Array:
    identity = jnp.broadcast_to(jnp.eye(lower.shape[-1]), lower.shape)
    half = solve_triangular(lower, identity, lower=True)
    return _transposed(half) @ half


def _host(function: Any, matrices: np.ndarray) -> tuple[np.ndarray]:
    order = matrices.shape[-1]
    stack = np.array(matrices).reshape(-1, order, order)  # XLA's buffer is not ours to overwrite
    for index, matrix in enumerate(stack):
        stack[index] = function(matrix)
    return (stack.reshape(matrices.shape),)


def _host_factor(matrices: np.ndarray) -> tuple[np.ndarray]:
    return _host(lambda matrix: lower_factor(matrix)[0], matrices)


def _host_inverse(factors: np.ndarray) -> tuple[np.ndarray]:
    return _host(inverse_of_factor, factors)


def _primitive(name: str, native: Any, host: Any, tangent: Any) -> Any:
    """A primitive from one stack of square matrices to another, by `host` on the CPU platform if large.

    `tangent` (input, output, input tangent) makes its derivative. It belongs to the primitive because JAX drops custom
    rules of functions when it splits a loop in two for a second derivative.
    """
    primitive = Primitive(name)
    compiled = jax.jit(primitive.bind)
    primitive.def_impl(lambda matrix: compiled(matrix))
    primitive.def_abstract_eval(lambda matrix: matrix.update(shape=matrix.shape, dtype=matrix.dtype))

    def lower_on_cpu(context: Any, matrix: Any) -> Any:
        (aval,) = context.avals_in
        if aval.shape[-1] < _HOST_ORDER:
            return mlir.lower_fun(native, multiple_results=False)(context, matrix)
        avals = context.avals_in, context.avals_out
        return mlir.emit_python_callback(
            context, host, None, [matrix], *avals, has_side_effect=False, returns_token=False
        )[0]

    def differentiate(primals: Any, tangents: Any) -> Any:
        out = primitive.bind(*primals)
        return out, tangent(*primals, out, *tangents)

    def batch(arguments: Any, axes: Any) -> Any:
        return primitive.bind(jnp.moveaxis(arguments[0], axes[0], 0)), 0

    mlir.register_lowering(primitive, lower_on_cpu, platform="cpu", cacheable=False)
    mlir.register_lowering(primitive, mlir.lower_fun(native, multiple_results=False))
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = differentiate
    return primitive


def _factor_tangent(matrix: Array, lower: Array, tangent: Array) -> Array:
    """L Phi(L^-1 dA L^-T), Phi the lower triangle with half the diagonal."""
    half = solve_triangular(lower, (tangent + _transposed(tangent)) / 2, lower=True)
    inner = jnp.tril(solve_triangular(lower, _transposed(half), lower=True))
    return lower @ (inner * (1 - jnp.eye(inner.shape[-1]) / 2))


def _inverse_tangent(lower: Array, inverse: Array, tangent: Array) -> Array:
    """-A^-1 dA A^-1 with A = L L'."""
    product = tangent @ _transposed(lower)
    return -(inverse @ (product + _transposed(product)) @ inverse)


_factor_p = _primitive("msrm_cholesky", _native_factor, _host_factor, _factor_tangent)
_inverse_p = _primitive("msrm_inverse", _native_inverse, _host_inverse, _inverse_tangent)


def cholesky(matrix: Array) -> Array:
    """Lower Cholesky factor of symmetric matrices, the lower triangle read, derivatives symmetric.

    Parameters
    ----------
    matrix : (..., n, n) float64
        Symmetric matrices.

    Returns
    -------
    (..., n, n)
        Zero above the diagonal; all NaN where a matrix is not finite or not positive definite.

    Raises
    ------
    TypeError, ValueError
        If not float64 or not square.
    """
    return _factor_p.bind(_checked(matrix))


def factor_inverse(lower: Array) -> Array:
    """Inverse of ``L L'`` from the factor L (..., n, n)."""
    return _inverse_p.bind(lower)


def solve_factor(lower: Array, right: Array) -> Array:
    """Solution of ``L L' x = right`` with right (..., n, m)."""
    return solve_triangular(lower, solve_triangular(lower, right, lower=True), lower=True, trans=1)


@jax.custom_jvp
def _core(matrix: Array, right: Array) -> tuple[Array, Array, Array]:
    lower = _factor_p.bind(matrix)
    logs = jnp.log(jnp.diagonal(lower, axis1=-2, axis2=-1)).sum(-1)
    return lower, 2 * logs, solve_factor(lower, right)


@_core.defjvp
def _core_jvp(primals: Any, tangents: Any) -> Any:
    (matrix, right), (d_matrix, d_right) = primals, tangents
    lower, logs, x = _core(matrix, right)
    # The factor is an output so that one factorization serves value and derivative; unused tangents are never run.
    d_matrix = (d_matrix + _transposed(d_matrix)) / 2
    d_logs = (factor_inverse(lower) * d_matrix).sum((-2, -1))
    d_x = solve_factor(lower, d_right - d_matrix @ x)
    return (lower, logs, x), (_factor_tangent(matrix, lower, d_matrix), d_logs, d_x)


def log_determinant_and_solve(matrix: Array, right: Array) -> tuple[Array, Array]:
    """Log determinant and ``matrix^-1 right`` from one factorization, differentiable to any order.

    Parameters
    ----------
    matrix : (..., n, n) float64
        Symmetric positive definite.
    right : (..., n, m) float64
        Right-hand sides.

    Returns
    -------
    log_determinant : (...,)
        NaN where the factorization failed.
    solution : (..., n, m)
        Likewise.
    """
    return _core(_checked(matrix), right)[1:]


def log_determinant(matrix: Array) -> Array:
    """Log determinant (...,) of symmetric positive definite matrices (..., n, n), NaN where there is no factor."""
    matrix = _checked(matrix)
    return _core(matrix, jnp.zeros((*matrix.shape[:-1], 0)))[1]


def solve(matrix: Array, right: Array) -> Array:
    """``matrix^-1 right`` (..., n, m) for symmetric positive definite matrices, NaN where there is no factor."""
    return _core(_checked(matrix), right)[2]


def diagnose(matrix: Array, lower: Array) -> Array:
    """Status of factorizations: 0 a factor, 1 matrix not finite, 2 matrix not positive definite.

    Parameters
    ----------
    matrix, lower : (..., n, n)
        What was factorized and what came out.

    Returns
    -------
    (...,) int32
        Index into `msrm.gp.cholesky.DIAGNOSTICS`.
    """
    finite = jnp.isfinite(matrix).all((-2, -1))
    factored = jnp.isfinite(jnp.diagonal(lower, axis1=-2, axis2=-1)).all(-1)
    return jnp.where(finite, jnp.where(factored, 0, 2), 1).astype(jnp.int32)
