"""Rotated features against the raw ones, with NumPy's own QR and masks written out."""

import numpy as np
import pytest

from msrm.rotation import reduce_pair
from msrm.stream import make_stream


def _reduced(values, rows=None, *, keep_mean, mean=None, scale=None, present=None):
    """The pair of one participant and modality from a list of arrays, one per run, and the raw kept rows."""
    pairs = [(block, 1.5 * np.arange(len(block))) for block in values]
    streams = [make_stream("p1", f"run-{r}", "brain", pair) for r, pair in enumerate(pairs)]
    rows = [np.ones(len(block), bool) for block in values] if rows is None else rows
    width = values[0].shape[1]
    mean = np.zeros(width) if mean is None else mean
    scale = np.ones(width) if scale is None else scale
    data = np.concatenate([(block[keep] - mean) / scale for block, keep in zip(values, rows, strict=True)])
    return reduce_pair(streams, rows, mean, scale, keep_mean=keep_mean, present=present), data


def _basis(pair):
    """V (feature, R) itself, by mapping unit vectors back."""
    return pair.to_features(np.eye(pair.n_coordinates))


@pytest.mark.parametrize("keep_mean", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize(("features", "lengths"), [(40, (9, 6)), (7, (9, 6)), (16, (9, 6)), (15, (15,)), (2, (5,))])
def test_complete_streams_keep_every_inner_product(features, lengths, offset, keep_mean):
    rng = np.random.default_rng(features)
    values = [rng.standard_normal((n, features)) + offset * rng.standard_normal(features) for n in lengths]
    pair, data = _reduced(values, keep_mean=keep_mean)
    reduced = np.concatenate(pair.values)
    assert pair.mask is None
    # Centred rows have rank T - 1, and the mean is one more direction.
    assert pair.n_coordinates == (sum(lengths) if features > sum(lengths) + keep_mean else features)
    assert pair.n_null == features - pair.n_coordinates
    assert pair.null_scalars == pair.n_null * sum(lengths)
    # A Gram of condition 1e9 (runs whose means differ by 1e4 sd) costs a few of 16 digits.
    scale = np.abs(data).max() ** 2 * features
    np.testing.assert_allclose(reduced @ reduced.T, data @ data.T, rtol=0, atol=1e-12 * scale)
    basis = _basis(pair)
    np.testing.assert_allclose(data @ basis, reduced, rtol=0, atol=1e-10 * np.abs(data).max())
    if keep_mean:
        # The promise of DESIGN 3.2: orthonormal at means of 1e4, mean inside the span.
        np.testing.assert_allclose(basis.T @ basis, np.eye(pair.n_coordinates), rtol=0, atol=1e-11)
        np.testing.assert_allclose(basis @ pair.mean_row, data.mean(0), rtol=0, atol=1e-11 * max(1.0, offset))
        np.testing.assert_allclose(basis @ reduced.T, data.T, rtol=0, atol=1e-11 * max(1.0, offset))


def test_standardization_row_choice_and_excluded_features_are_obeyed():
    rng = np.random.default_rng(3)
    values = [rng.standard_normal((8, 30)) * 4 + 2, rng.standard_normal((5, 30))]
    rows = [np.arange(8) % 3 > 0, np.arange(5) < 4]
    mean, scale, present = rng.standard_normal(30), rng.uniform(1, 2, 30), np.arange(30) != 11
    pair, data = _reduced(values, rows, keep_mean=False, mean=mean, scale=scale, present=present)
    reduced = np.concatenate(pair.values)
    assert [len(block) for block in pair.values] == [5, 4]
    np.testing.assert_allclose(reduced @ reduced.T, data[:, present] @ data[:, present].T, atol=1e-12)
    assert all((count == 29).all() for count in pair.counts)
    mapped = pair.to_features(rng.standard_normal((pair.n_coordinates, 2)))
    assert np.isnan(mapped[11]).all()
    assert np.isfinite(mapped[present]).all()


@pytest.mark.parametrize("keep_mean", [False, True])
def test_features_are_rotated_within_their_mask_pattern_only(keep_mean):
    rng = np.random.default_rng(5)
    values = rng.standard_normal((12, 60)) + 3
    values[:5, 3:33] = np.nan  # a pattern of 30 features on 7 rows: rotated
    values[8, 40] = values[2, 41] = np.nan  # two patterns of one feature: kept as they are
    values[:, 50] = np.nan  # fully missing: absent
    pair, data = _reduced([values], keep_mean=keep_mean)
    reduced, mask = pair.values[0], pair.mask[0]
    sizes = sorted((len(group.features), group.n_rows) for group in pair.groups)
    assert sizes == [(2, 12), (27, 12), (30, 7)]
    assert pair.n_coordinates == (7 + 12) + 2
    assert pair.null_scalars == (30 - 7) * 7 + (27 - 12) * 12
    np.testing.assert_array_equal(pair.counts[0], np.isfinite(data).sum(1))
    assert (reduced[~mask] == 0).all()
    filled = np.where(np.isfinite(data), data, 0.0)
    np.testing.assert_allclose(reduced @ reduced.T, filled @ filled.T, atol=1e-11)
    # Within the model: residuals of any loading in the span agree entry for entry in their sums.
    loading, path = rng.standard_normal((pair.n_coordinates, 2)), rng.standard_normal((12, 2))
    raw = pair.to_features(loading)
    squares = np.nansum((data - path @ raw.T) ** 2, axis=1)
    np.testing.assert_allclose((((reduced - path @ loading.T) * mask) ** 2).sum(1), squares, rtol=1e-11)
    np.testing.assert_allclose(pair.to_reduced(np.nan_to_num(raw)), loading, atol=1e-11)


def test_many_mask_patterns_stay_raw():
    rng = np.random.default_rng(6)
    values = rng.standard_normal((20, 50))
    values[rng.uniform(size=values.shape) < 0.2] = np.nan
    pair, data = _reduced([values], keep_mean=False)
    assert pair.n_null == 0
    np.testing.assert_array_equal(np.where(pair.mask[0], pair.values[0], np.nan), data)


def test_a_rank_deficient_stream_keeps_its_rank():
    rng = np.random.default_rng(7)
    values = rng.standard_normal((10, 3)) @ rng.standard_normal((3, 25))
    pair, data = _reduced([values], keep_mean=True)
    assert pair.n_coordinates == 3
    np.testing.assert_allclose(pair.values[0] @ pair.values[0].T, data @ data.T, atol=1e-12)


def test_projections_agree_with_numpy_qr():
    rng = np.random.default_rng(8)
    values = rng.standard_normal((9, 31)) + 5
    pair, data = _reduced([values], keep_mean=True)
    q, _ = np.linalg.qr(data.T)
    features = rng.standard_normal((31, 4))
    np.testing.assert_allclose(pair.to_features(pair.to_reduced(features)), q @ (q.T @ features), atol=1e-12)
