"""Band algebra against dense NumPy."""

import numpy as np
import pytest

from msrm.banded import FactorPairs, TemporalRows, band_cholesky, kron_sum, zero_band


def dense_of_band(band: np.ndarray) -> np.ndarray:
    out = np.zeros((band.shape[1], band.shape[1]))
    for offset in range(min(band.shape)):
        index = np.arange(band.shape[1] - offset)
        out[index + offset, index] = out[index, index + offset] = band[offset, : len(index)]
    return out


def rows_and_dense(seed: int, rows: int = 17, width: int = 4, length: int = 12) -> tuple[TemporalRows, np.ndarray]:
    rng = np.random.default_rng(seed)
    first = rng.integers(0, length - width + 1, rows)
    weights = rng.standard_normal((rows, width))
    dense = np.zeros((rows, length))
    for n in range(rows):
        dense[n, first[n] : first[n] + width] = weights[n]
    return TemporalRows(first, weights, length), dense


def definite_band(seed: int, bandwidth: int, order: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    band = zero_band(bandwidth, order)
    for offset in range(bandwidth + 1):
        band[offset, : max(order - offset, 0)] = rng.standard_normal(max(order - offset, 0))
    band[0] = 2.0 * bandwidth + 1.0 + rng.uniform(0, 1, order)
    return band


def test_apply_and_adjoint_are_the_dense_matrix():
    rows, dense = rows_and_dense(0)
    rng = np.random.default_rng(1)
    columns, values = rng.standard_normal((12, 3)), rng.standard_normal((17, 2, 2))
    np.testing.assert_allclose(rows.apply(columns), dense @ columns, atol=1e-14)
    np.testing.assert_allclose(rows.apply(columns[:, 0]), dense @ columns[:, 0], atol=1e-14)
    np.testing.assert_allclose(rows.adjoint(values), np.einsum("nl,nij->lij", dense, values), atol=1e-14)


@pytest.mark.parametrize("ordered", [True, False])
def test_gram_and_windows_are_adjoint_to_each_other(ordered):
    rows, dense = rows_and_dense(2)
    if ordered:
        order = np.argsort(rows.first, kind="stable")
        rows, dense = TemporalRows(rows.first[order], rows.weights[order], 12), dense[order]
    weights = np.random.default_rng(3).standard_normal((17, 2))
    np.testing.assert_allclose(dense_of_band(rows.gram()), dense.T @ dense, atol=1e-13)
    band = rows.gram(weights)
    for k in range(2):
        np.testing.assert_allclose(dense_of_band(band[..., k]), dense.T @ (weights[:, [k]] * dense), atol=1e-13)
    matrix = dense_of_band(definite_band(4, 3, 12))
    windows = rows.windows(definite_band(4, 3, 12))
    expected = np.einsum("nl,lk,nk->n", dense, matrix, dense)
    np.testing.assert_allclose((windows * rows.weights).sum(1), expected, rtol=1e-12)
    several = rows.windows(np.stack([definite_band(4, 3, 12), definite_band(5, 3, 12)], axis=-1))
    np.testing.assert_allclose(several[..., 0], windows, atol=1e-13)


def test_windows_outside_move_inside_and_weights_there_are_refused():
    rows = TemporalRows(np.array([-1, 3]), np.array([[0.0, 1.0, 2.0], [3.0, 4.0, 0.0]]), 5)
    dense = np.array([[1.0, 2, 0, 0, 0], [0, 0, 0, 3, 4]])
    np.testing.assert_array_equal(rows.matrix.toarray(), dense)
    np.testing.assert_allclose(dense_of_band(rows.gram()), dense.T @ dense)
    narrow = TemporalRows(np.array([0]), np.array([[1.0, 2.0, 0.0]]), 2)
    np.testing.assert_array_equal(narrow.matrix.toarray(), [[1.0, 2.0]])
    with pytest.raises(ValueError, match="row 0 has a nonzero weight outside its 5 columns"):
        TemporalRows(np.array([-1]), np.array([[1.0, 1.0, 2.0]]), 5)


def test_no_rows_give_a_zero_band():
    rows = TemporalRows(np.zeros(0, int), np.zeros((0, 3)), 6)
    assert rows.gram().shape == (3, 6)
    assert not rows.gram(np.zeros((0, 2))).any()


@pytest.mark.parametrize("size", [1, 3])
def test_kron_sum_and_its_adjoints(size):
    rows, dense = rows_and_dense(6)
    rng = np.random.default_rng(7)
    matrix = rng.standard_normal((2, size, size))
    matrix = matrix + np.swapaxes(matrix, 1, 2)
    weights = rng.uniform(size=(17, 2))
    grams = [dense.T @ (weights[:, [k]] * dense) for k in range(2)]
    narrow = np.eye(2, 12, k=0) + 1.0
    out = kron_sum([(rows.gram(weights), matrix), (rows.gram(), matrix[0]), (narrow, matrix[1])], size, 12)
    expected = sum(np.kron(g, m) for g, m in zip(grams, matrix, strict=True))
    expected = expected + np.kron(dense.T @ dense, matrix[0]) + np.kron(dense_of_band(narrow), matrix[1])
    np.testing.assert_allclose(dense_of_band(out), expected, atol=1e-12)
    assert out.flags.f_contiguous  # what LAPACK takes without a copy

    inverse = definite_band(8, size * rows.width - 1, size * 12)
    full = dense_of_band(inverse).reshape(12, size, 12, size)
    pairs = FactorPairs(inverse, size)
    moment = pairs.moment(rows.gram(weights))
    np.testing.assert_allclose(moment[1], np.einsum("lm,limk->ik", grams[1], full), atol=1e-10)
    np.testing.assert_allclose(pairs.moment(rows.gram()), np.einsum("lm,limk->ik", dense.T @ dense, full))
    wanted = np.einsum("ik,limk->lm", matrix[0], full)
    for width in (2, rows.width):
        inside = np.abs(np.subtract.outer(np.arange(12), np.arange(12))) < width
        np.testing.assert_allclose(
            dense_of_band(pairs.trace(matrix[0], width)), np.where(inside, wanted, 0.0), atol=1e-11
        )


@pytest.mark.parametrize(("bandwidth", "order"), [(0, 7), (3, 1), (3, 4), (5, 131), (70, 200)])
def test_cholesky_determinant_solve_and_selected_inverse(bandwidth, order):
    band = definite_band(9, bandwidth, order)
    dense = dense_of_band(band)
    factor = band_cholesky(band)
    assert factor.ok
    assert factor.diagnostic == ""
    np.testing.assert_allclose(factor.log_determinant, np.linalg.slogdet(dense)[1], rtol=1e-13)
    right = np.random.default_rng(10).standard_normal((order, 2))
    np.testing.assert_allclose(factor.solve(right), np.linalg.solve(dense, right), rtol=1e-11, atol=1e-13)
    inverse = np.linalg.inv(dense)
    found = factor.inverse_band()
    assert found.shape == band.shape
    for offset in range(min(bandwidth + 1, order)):
        np.testing.assert_allclose(found[offset, : order - offset], np.diag(inverse, offset), rtol=1e-10, atol=1e-14)


def test_sample_has_the_inverse_as_its_covariance():
    factor = band_cholesky(definite_band(11, 3, 20))
    root = factor.sample(np.eye(20))  # A^-1 = R R' exactly, no Monte Carlo
    np.testing.assert_allclose(root @ root.T, np.linalg.inv(dense_of_band(definite_band(11, 3, 20))), atol=1e-14)


def test_indefinite_and_non_finite_matrices_are_named_not_repaired():
    band = definite_band(12, 2, 9)
    band[0, 4] = -1.0
    bad = band_cholesky(band)
    assert not bad.ok
    assert "not positive definite: pivot 5 failed" in bad.diagnostic
    assert np.isnan(bad.log_determinant)
    band[1, 6] = np.nan
    assert "not finite in column 6" in band_cholesky(band).diagnostic
    band[1, 6] = np.inf
    assert not band_cholesky(band).ok
