"""Block tridiagonal solvers against dense NumPy: values, two derivatives, selected inverse, draws, memory, failure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrm.gp.blocks import Sequential, inverse_factor, log_evidence, triangular_inverse
from msrm.gp.cyclic import Parallel

SOLVERS = {
    "sequential": Sequential(chunk=4),
    "one chunk": Sequential(chunk=100),
    "parallel": Parallel(),
    "to the last block": Parallel(root=1),
    "dense root": Parallel(root=7, triangle=3),
}


def system(count: int, order: int, seed: int = 0, diagonal: float = 2.0):
    """A well-conditioned system: dense matrix (n b, n b), diagonal and lower blocks, from a random factor."""
    rng = np.random.default_rng(seed)
    factor = np.zeros((count, order, count, order))
    for i in range(count):
        factor[i, :, i] = np.tril(rng.standard_normal((order, order))) / np.sqrt(order) + diagonal * np.eye(order)
        if i:
            factor[i, :, i - 1] = rng.standard_normal((order, order)) / np.sqrt(order)
    factor = factor.reshape(count * order, count * order)
    dense = factor @ factor.T
    return dense, *blocks_of(dense, count, order)


def blocks_of(dense, count, order):
    blocks = dense.reshape(count, order, count, order).swapaxes(1, 2)
    within = np.array([blocks[i, i] for i in range(count)])
    below = np.array([blocks[i + 1, i] for i in range(count - 1)]).reshape(count - 1, order, order)
    return within, below


# Compiling is what takes the time (4 s of one core each), so a few cases stand for the rest in every run.
QUICK = [("sequential", 6), ("sequential", 1), ("parallel", 2), ("parallel", 33), ("to the last block", 8)]
CASES = [(name, count) for name in ("sequential", "parallel", "to the last block") for count in (1, 6, 33)]
CASES += [("one chunk", 5), ("dense root", 40)]
CASES = QUICK + [pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in QUICK]


@pytest.mark.parametrize(("name", "count"), CASES)
def test_values_and_draws_agree_with_numpy(name, count):
    solver, order = SOLVERS[name], 2
    dense, diagonal, lower = system(count, order, seed=count)
    inverse = np.linalg.inv(dense)
    right = np.random.default_rng(1).standard_normal((count, order, 2))
    flat = right.reshape(-1, 2)

    @jax.jit
    def everything(diagonal, lower, right):
        factor = solver.forward(diagonal, lower, right)
        unit = jnp.eye(count * order).reshape(-1, count, order, 1) * jnp.ones(2)
        draws = jax.vmap(lambda normals: solver.sample(factor, normals))(unit)
        return factor.log_determinant, factor.quadratic, *solver.backward(factor), draws

    log_determinant, quadratic, solution, within, below, draws = everything(diagonal, lower, right)
    # Conditions up to 1e5 at these sizes: rounding times condition stays below 1e-9.
    np.testing.assert_allclose(log_determinant, np.linalg.slogdet(dense)[1], rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(quadratic, np.einsum("im,im->m", flat, inverse @ flat), rtol=1e-9)
    np.testing.assert_allclose(solution.reshape(-1, 2), inverse @ flat, rtol=1e-9, atol=1e-10)
    expected_within, expected_below = blocks_of(inverse, count, order)
    np.testing.assert_allclose(within, expected_within, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(below, expected_below, rtol=1e-9, atol=1e-10)
    np.testing.assert_array_equal(within, np.swapaxes(within, 1, 2))
    # A draw is affine in its standard normals, so unit normals give its covariance without sampling.
    columns = np.asarray(draws - solution)[..., 1].reshape(count * order, -1)
    np.testing.assert_allclose(columns.T @ columns, inverse, rtol=1e-8, atol=1e-10)


def dense_value(diagonal, lower, right):
    """The log evidence by dense native JAX."""
    count, order = diagonal.shape[:2]
    matrix = jnp.zeros((count, order, count, order))
    for i in range(count):
        matrix = matrix.at[i, :, i].set((diagonal[i] + diagonal[i].T) / 2)
        if i:
            matrix = matrix.at[i, :, i - 1].set(lower[i - 1]).at[i - 1, :, i].set(lower[i - 1].T)
    matrix, flat = matrix.reshape(count * order, -1), right.ravel()
    return 0.5 * (flat @ jnp.linalg.solve(matrix, flat) - jnp.linalg.slogdet(matrix)[1])


BOTH = pytest.mark.parametrize("solver", [Sequential(chunk=4), Parallel(root=1)], ids=["sequential", "parallel"])


@pytest.mark.slow
@BOTH
def test_two_derivatives_agree_with_dense_native_ones(solver):
    _, diagonal, lower = system(5, 2, seed=3)
    right = np.random.default_rng(4).standard_normal((5, 2))
    arguments = (jnp.asarray(diagonal), jnp.asarray(lower), jnp.asarray(right))
    ours = jax.jit(jax.value_and_grad(lambda *a: log_evidence(solver, *a), argnums=(0, 1, 2)))(*arguments)
    native = jax.jit(jax.value_and_grad(dense_value, argnums=(0, 1, 2)))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), ours, native)
    directions = [np.random.default_rng(5 + k).standard_normal(a.shape) for k, a in enumerate(arguments)]
    directions[0] += np.swapaxes(directions[0], 1, 2)

    def along(function, t):
        return function(*(a + t * d for a, d in zip(arguments, directions, strict=True)))

    for outer in (jax.grad, jax.jacfwd):
        second = [
            jax.jit(outer(jax.grad(lambda t, f=f: along(f, t))))(0.0)
            for f in (lambda *a: log_evidence(solver, *a), dense_value)
        ]
        np.testing.assert_allclose(second[0], second[1], rtol=1e-8)


def test_forward_mode_agrees_with_reverse_mode():
    _, diagonal, lower = system(6, 2)

    def value(t):
        return log_evidence(Parallel(root=1), diagonal * jnp.exp(t), lower * jnp.exp(t), jnp.ones((6, 2)))

    np.testing.assert_allclose(jax.jit(jax.jacfwd(value))(0.3), jax.jit(jax.grad(value))(0.3), rtol=1e-12)


@BOTH
def test_a_zero_coupling_separates_systems(solver):
    one, two = system(5, 3, seed=1), system(9, 3, seed=2)
    diagonal = np.concatenate([one[1], two[1]])
    lower = np.concatenate([one[2], np.zeros((1, 3, 3)), two[2]])
    right = np.random.default_rng(0).standard_normal((14, 3))
    value = jax.jit(lambda *arguments: log_evidence(solver, *arguments))
    parts = value(*one[1:], right[:5]) + value(*two[1:], right[5:])
    np.testing.assert_allclose(value(diagonal, lower, right), parts, rtol=1e-12)


@pytest.mark.parametrize("order", [20, 37])
def test_factorization_by_halves_agrees(order):
    dense, _, _ = system(1, order)
    stack = np.stack([dense, 3.0 * dense])
    whole, logs = inverse_factor(stack, None)
    halves, halves_logs = inverse_factor(stack, 8)
    np.testing.assert_allclose(halves, whole, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(halves_logs, logs, rtol=1e-12)
    np.testing.assert_allclose(whole[0] @ dense @ whole[0].T, np.eye(order), rtol=0, atol=1e-11)


@pytest.mark.slow
@BOTH
def test_vectorized_over_chains(solver):
    systems = [system(10, 2, seed=s)[1:] for s in range(3)]
    diagonal, lower = (np.stack(part) for part in zip(*systems, strict=True))
    right = np.random.default_rng(0).standard_normal((3, 10, 2))
    value = jax.jit(lambda *arguments: log_evidence(solver, *arguments))
    singly = [value(*arguments) for arguments in zip(diagonal, lower, right, strict=True)]
    np.testing.assert_allclose(jax.jit(jax.vmap(value))(diagonal, lower, right), singly, rtol=1e-12)


@BOTH
def test_failures_are_nan_in_value_and_gradient(solver):
    _, diagonal, lower = system(12, 3)
    right = jnp.ones((12, 3))
    compiled = jax.jit(jax.value_and_grad(lambda d: log_evidence(solver, d, lower, right)))
    assert np.isfinite(compiled(diagonal)[0])
    for where, broken in (
        (0, -np.eye(3)),
        (5, np.full((3, 3), np.nan)),
        (7, np.diag([np.inf, 1, 1])),
        (11, -np.eye(3)),
    ):
        bad = diagonal.copy()
        bad[where] = broken
        value, gradient = compiled(bad)
        assert np.isnan(value)
        assert np.isnan(gradient).any()


@BOTH
def test_ill_conditioned_systems_degrade_gracefully(solver):
    """A chain of stiff springs: condition 1e11, like a fine grid under sharp data in a few places."""
    count, order, stiffness = 40, 2, 1e8
    diagonal = np.broadcast_to(2 * stiffness * np.eye(order), (count, order, order)).copy()
    diagonal[0] -= (stiffness - 1.0) * np.eye(order)
    diagonal[-1] -= stiffness * np.eye(order)
    lower = np.broadcast_to(-stiffness * np.eye(order), (count - 1, order, order))
    right = np.random.default_rng(0).standard_normal((count, order))
    # Every other pivot of the chain is known: the first is 1 + stiffness and all later ones follow by hand.
    pivot, log_determinant = stiffness + 1.0, 0.0
    for i in range(count):
        log_determinant += order * np.log(pivot)
        ahead = stiffness if i + 2 == count else 2 * stiffness
        pivot = ahead - stiffness**2 / pivot
    factor = jax.jit(solver.forward)(diagonal, lower, right[..., None])
    solution = np.asarray(jax.jit(solver.backward)(factor)[0])[..., 0]
    residual = np.einsum("nij,nj->ni", diagonal, solution) - right
    residual[1:] += np.einsum("nij,nj->ni", lower, solution[:-1])
    residual[:-1] += np.einsum("nji,nj->ni", lower, solution[1:])
    size = 4 * stiffness * np.abs(solution).max()
    assert np.abs(residual).max() / size < 1e-14 * count * order
    # The smallest pivot is 1e-8 of the entries it is the difference of, so half the digits are left.
    np.testing.assert_allclose(factor.log_determinant, log_determinant, rtol=1e-8)


def temporary_bytes(solver, count, order):
    shapes = [(count, order, order), (count - 1, order, order), (count, order)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float64) for shape in shapes]
    value = jax.value_and_grad(lambda *a: log_evidence(solver, *a), argnums=(0, 1, 2))
    return jax.jit(value).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_linear_with_a_small_constant():
    order, solver = 24, Sequential(chunk=16)
    block = order * order * 8
    small, large = (temporary_bytes(solver, count, order) for count in (256, 512))
    growth = (large - small) / 256 / block
    fixed = (small - 256 * growth * block) / block
    # The input and the gradient are two blocks a step each. Beyond them: two of padded input, four of selected
    # inverse and its products, a sixteenth of a carry; and the factors of one chunk, twice.
    assert growth < 7.0
    assert fixed < 8 * 16


def test_no_recompilation_for_new_numbers():
    _, diagonal, lower = system(9, 2)
    traces = []

    @jax.jit
    def value(scale):
        traces.append(1)
        return log_evidence(Parallel(), diagonal * scale, lower * scale, jnp.ones((9, 2)))

    values = [float(value(scale)) for scale in (1.0, 2.0, 3.0)]
    assert len(traces) == 1
    assert len(set(values)) == 3


def test_one_block_at_least_is_left():
    with pytest.raises(ValueError, match="root must be at least 1, found 0"):
        Parallel(root=0)


@pytest.mark.parametrize(("order", "leaf"), [(7, 3), (12, 5), (16, 4), (5, 8)])
def test_triangular_inverse_by_pieces(order, leaf):
    rng = np.random.default_rng(order)
    lower = np.tril(rng.standard_normal((2, order, order))) + 3.0 * np.eye(order)
    found = triangular_inverse(jnp.asarray(lower), leaf)
    np.testing.assert_allclose(found @ lower, np.broadcast_to(np.eye(order), lower.shape), rtol=0, atol=1e-12)
    assert not np.triu(found, 1).any()
