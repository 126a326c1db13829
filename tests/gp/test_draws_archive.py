"""An archive of draws is the draws: answers without the recording, raw features with stored bases or the recording."""

import arviz_stats
import numpy as np
import pytest
import xarray as xr

import msrm
from msrm.gp.sampling import sample


def recording_of(runs: tuple[str, ...] = ("run-1",), seed: int = 0) -> msrm.Recording:
    """Two participants, a stream with more features than rows, gaps in it, and a filtered one."""
    rng = np.random.default_rng(seed)
    slow, fast = 1.8 * np.arange(9), 1.2 * np.arange(12)

    def seen(times: np.ndarray, features: int) -> np.ndarray:
        path = np.stack([np.sin(times / 2.5), np.cos(times / 3.7)], axis=1)
        values = path @ rng.standard_normal((2, features)) + 0.5 * rng.standard_normal((len(times), features))
        if features > 5:
            values[2, :4] = np.nan
        return values

    return msrm.Recording.from_dict(
        {p: {run: {"brain": (seen(slow, 24), slow), "rating": (seen(fast, 3), fast)} for run in runs} for p in "ab"}
    )


@pytest.fixture(scope="module")
def recording():
    return recording_of()


@pytest.fixture(scope="module")
def draws(recording):
    lag = msrm.Free(0.2, bounds=(-1.0, 1.0), prior=msrm.Normal(0.0, 0.5))
    model = msrm.GPMSRM(2, {"brain": msrm.Identity(), "rating": msrm.Gaussian(width=0.6, lag=lag)}, n_starts=1)
    return sample(model.fit(recording), recording, chains=2, warmup=30, draws=20, seed=1, progress=False)


def test_reopened_draws_answer_bit_for_bit_without_the_recording(draws, recording, tmp_path):
    again = msrm.open_fit(draws.save(tmp_path / "draws.nc", bases=False))
    assert isinstance(again, msrm.Draws)
    asked = {"targets": {"a": ["rating"]}, "noise": True, "joint": "feature"}
    assert again.predict(recording, **asked)["a/run-1/rating"].identical(
        draws.predict(recording, **asked)["a/run-1/rating"]
    )
    assert again.infer_latent().identical(draws.infer_latent())
    assert again.transform(recording).identical(draws.transform(recording))
    xr.testing.assert_equal(again.summary().table, draws.summary().table)
    assert again.summary().verdict == draws.summary().verdict
    assert again.model.objective_ == draws.model.objective_
    assert repr(again.model) == repr(draws.model)
    assert again.tree.attrs["seed"] == 1


def test_raw_features_come_from_stored_bases_or_the_recording_only(draws, recording, tmp_path):
    with_bases = msrm.open_fit(draws.save(tmp_path / "with.nc"))
    without = msrm.open_fit(draws.save(tmp_path / "without.nc", bases=False))
    with pytest.raises(ValueError, match=r"need the recording: .*with_recording"):
        without.loading("a", "brain")
    with pytest.raises(ValueError, match="made from the recording with digest"):
        without.with_recording(recording_of(seed=3))
    with pytest.raises(ValueError, match="no data at hand"):
        without.save(tmp_path / "no.nc", bases=True)
    for modality in ("brain", "rating"):
        expected = draws.loading("b", modality)
        # The basis is stored to rounding; the recording gives the very same sums.
        np.testing.assert_allclose(with_bases.loading("b", modality), expected, rtol=1e-9, atol=1e-11)
        np.testing.assert_array_equal(without.with_recording(recording).loading("b", modality), expected)
        np.testing.assert_allclose(with_bases.offset("b", modality), draws.offset("b", modality), atol=1e-10)
    # Bases survive another save.
    third = msrm.open_fit(with_bases.save(tmp_path / "third.nc"))
    np.testing.assert_array_equal(third.loading("a", "brain"), with_bases.loading("a", "brain"))


def test_the_archive_itself_is_readable_by_arviz(draws, tmp_path):
    path = draws.save(tmp_path / "draws.nc")
    with xr.open_datatree(path, engine="netcdf4") as tree:
        there = arviz_stats.ess(tree, method="bulk")["noise"].values
    np.testing.assert_array_equal(there, arviz_stats.ess(draws.tree, method="bulk")["noise"].values)


def test_a_damaged_archive_of_draws_is_refused(draws, tmp_path):
    path = draws.save(tmp_path / "draws.nc")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        msrm.open_fit(path)


@pytest.mark.parametrize("aligned", [True, False])
def test_loadings_are_written_out_by_feature_range(draws, tmp_path, aligned, monkeypatch):
    monkeypatch.setattr("msrm.gp.raw_file._PIECE_BYTES", 8 * 24 * 3 * 7)
    path = draws.write_loadings(tmp_path / "raw.nc", "a", "brain", features=range(5, 12), aligned=aligned)
    with xr.open_dataset(path, engine="netcdf4") as written:
        expected = draws.loading("a", "brain", features=range(5, 12), aligned=aligned)
        # Raw rows of other pieces of draws differ by rounding in the products.
        np.testing.assert_allclose(written["loading"], expected, rtol=1e-10, atol=1e-12)
        assert list(written["feature"].values) == list(expected["feature"].values)
    with pytest.raises(ValueError, match="has 24 features, positions 0 to 23"):
        draws.write_loadings(tmp_path / "raw.nc", "a", "brain", features=range(20, 30))
