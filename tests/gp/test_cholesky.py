"""The host factorization against eigenvalues and dense NumPy, and the guard that refuses before allocating."""

import numpy as np
import pytest

from msrm.gp.cholesky import LAPACK_ORDER, check_order, factorize, host_memory, inverse_of_factor
from msrm.runtime import blas_libraries


def random_spd(order: int, condition: float, seed: int = 0) -> np.ndarray:
    """A symmetric matrix with eigenvalues spread evenly in the logarithm from 1/condition to 1."""
    rng = np.random.default_rng(seed)
    vectors = np.linalg.qr(rng.standard_normal((order, order)))[0]
    matrix = (vectors * np.geomspace(1 / condition, 1, order)) @ vectors.T
    return (matrix + matrix.T) / 2


@pytest.mark.parametrize("order", [1, 2, 17, 300, 700])
def test_agrees_with_eigenvalues(order):
    matrix, right = random_spd(order, 1e3), np.random.default_rng(1).standard_normal((order, 3))
    factor = factorize(matrix)
    values, vectors = np.linalg.eigh(matrix)
    assert factor.ok
    # Condition 1e3 times rounding of 1e-16 times order: 1e-10 has room for the oracle's own error.
    np.testing.assert_allclose(factor.log_determinant, np.log(values).sum(), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(
        factor.solve(right), vectors @ ((vectors.T @ right) / values[:, None]), rtol=0, atol=1e-9
    )
    np.testing.assert_allclose(factor.inverse(), (vectors / values) @ vectors.T, rtol=0, atol=1e-9)
    np.testing.assert_allclose(factor.lower @ factor.lower.T, matrix, rtol=0, atol=1e-13)
    np.testing.assert_allclose(factor.lower @ factor.whiten(right), right, rtol=0, atol=1e-11)
    np.testing.assert_allclose(factor.lower.T @ factor.whiten(right, transpose=True), right, rtol=0, atol=1e-11)
    assert np.array_equal(factor.lower, np.tril(factor.lower))


def test_vector_right_hand_side_and_symmetric_inverse():
    factor = factorize(random_spd(600, 10.0))
    inverse = factor.inverse()
    assert np.array_equal(inverse, inverse.T)
    np.testing.assert_allclose(factor.solve(np.ones(600)), inverse.sum(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", ["C", "F"])
def test_overwrite_gives_the_same_factor(layout):
    matrix = random_spd(300, 1e2)
    expected = factorize(matrix).lower
    kept = matrix.copy()
    assert np.array_equal(factorize(np.array(matrix, order=layout), overwrite=True).lower, expected)
    factorize(matrix)
    assert np.array_equal(matrix, kept)


def test_ill_conditioned_has_a_small_backward_error():
    for order, condition in ((50, 1e12), (400, 1e14)):
        matrix = random_spd(order, condition)
        factor = factorize(matrix)
        assert factor.ok
        # Backward stability: (n + 1) rounding errors relative to the matrix (Higham, Accuracy and Stability, 10.1).
        error = np.linalg.norm(factor.lower @ factor.lower.T - matrix, 2) / np.linalg.norm(matrix, 2)
        assert error < 1e-14 * order


def test_indefinite_is_nan_with_the_minor_named():
    matrix = np.diag([1.0, 2.0, -3.0, 4.0])
    factor = factorize(matrix)
    assert not factor.ok
    assert "leading minor 3 of a matrix of order 4 fails: not positive definite" in factor.diagnostic
    assert np.isnan(factor.log_determinant)
    for result in (factor.solve(np.ones(4)), factor.whiten(np.ones((4, 2))), factor.inverse(), factor.lower):
        assert np.isnan(result).all()
    assert np.array_equal(matrix, np.diag([1.0, 2.0, -3.0, 4.0]))  # no jitter was put on the diagonal


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_is_nan_with_the_entry_named(value):
    matrix = np.eye(6)
    matrix[4, 2] = matrix[2, 4] = value
    factor = factorize(matrix)
    assert f"entry (2, 4) of a matrix of order 6 is {value}: not finite" in factor.diagnostic
    assert np.isnan(factor.lower).all()


def test_finite_entries_whose_sum_overflows_are_not_refused():
    assert factorize(np.diag([1e308, 1e308, 1e308])).ok


def test_only_float64_and_square():
    with pytest.raises(TypeError, match="needs float64, found float32"):
        factorize(np.eye(3, dtype=np.float32))
    with pytest.raises(ValueError, match=r"square matrix, found shape \(3, 2\)"):
        factorize(np.ones((3, 2)))


def test_inverse_of_a_failed_factor_is_nan():
    assert np.isnan(inverse_of_factor(np.full((3, 3), np.nan))).all()


def test_guard_names_statespace():
    with pytest.raises(MemoryError, match=r"order 40,000 is above 32,768.*likelihood=\"statespace\""):
        check_order(40_000, copies=1)
    with pytest.raises(MemoryError, match=r"needs 4.80 GB \(6 matrices of float64\), the host has 1.00 GB.*statespace"):
        check_order(10_000, copies=6, available=10**9)
    check_order(LAPACK_ORDER, copies=1)
    check_order(10_000, copies=1, available=10**9)


def test_refuses_before_allocating():
    # A broadcast view of one number: nothing of its nominal size (14 GB) exists, nor may come to exist.
    with pytest.raises(MemoryError, match="order 42,000"):
        factorize(np.broadcast_to(1.0, (42_000, 42_000)))


def test_host_memory_reads_the_control_group(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    assert host_memory(tmp_path) == 3000 * 1024
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert host_memory(tmp_path) == 3000 * 1024
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("2000000\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("500000\n")
    assert host_memory(tmp_path) == 1_500_000


def test_thread_counts_are_restored():
    before = [library.get_num_threads() for library in blas_libraries()]
    factorize(random_spd(300, 10.0)).inverse()
    assert [library.get_num_threads() for library in blas_libraries()] == before
