"""What the pictures show: every line is read back from the axes and compared with the data."""

import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr

mpl.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")

import msrm  # noqa: E402
from msrm import plots  # noqa: E402


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def path(seconds: float = 30.0, factors: int = 2, gap: bool = False, **extra) -> xr.Dataset:
    """A latent or prediction of smooth paths every second, unsupported from 10 to 14 s."""
    times = np.arange(0.0, seconds)
    times = times[(times < 20) | (times > 25)] if gap else times
    values = np.sin(times[:, None] / (3.0 + np.arange(factors)))
    data = xr.Dataset(
        {"mean": (("time", "factor"), values), "supported": ("time", ~((times >= 10) & (times <= 14)))},
        coords={"time": times, "factor": np.arange(1, factors + 1)},
    )
    return data.assign({name: (("time", "factor"), np.full(values.shape, value)) for name, value in extra.items()})


def drawn(axis, line: int = 0) -> np.ndarray:
    """(point, 2) of one line, NaN rows left out."""
    points = axis.lines[line].get_xydata()
    return points[np.isfinite(points).all(axis=1)]


class TestLatents:
    def test_a_row_for_each_factor_and_a_column_for_each_run(self):
        tree = xr.DataTree.from_dict({"run-1": path(), "run-2": path(20.0)})
        axes = plots.latents(tree)
        assert axes.shape == (2, 2)
        assert axes[0, 1].get_title() == "run-2"
        seen = tree["run-1"].to_dataset().isel(factor=1).where(tree["run-1"]["supported"], drop=True)
        np.testing.assert_array_equal(drawn(axes[1, 0]), np.c_[seen["time"], seen["mean"]])

    def test_unsupported_times_are_shaded(self):
        axis = plots.latents(path())[0, 0]
        span = axis.patches[0].get_extents().transformed(axis.transData.inverted())
        assert (span.x0, span.x1) == pytest.approx((9.5, 14.5))
        dashed = drawn(axis, 1)
        assert (dashed[:, 0].min(), dashed[:, 0].max()) == (9.0, 15.0)

    def test_variance_is_a_band_of_two_deviations(self):
        axis = plots.latents(path(variance=0.25))[0, 0]
        band = axis.collections[0].get_paths()[0].vertices
        at_zero = band[band[:, 0] == 0.0][:, 1]
        assert (at_zero.min(), at_zero.max()) == pytest.approx((-1.0, 1.0))

    def test_lines_break_in_gaps(self):
        points = plots.latents(path(gap=True))[0, 0].lines[0].get_xydata()
        hole = np.flatnonzero(points[:, 0] == 19.0)
        assert np.isnan(points[hole[-1], 1])

    def test_reference_and_given_axes(self):
        _, mine = plt.subplots(2, 1, squeeze=False)
        reference = {"": path()["mean"]}
        axes = plots.latents(path(), reference=reference, axes=mine)
        assert axes[0, 0] is mine[0, 0]
        np.testing.assert_array_equal(drawn(axes[1, 0], -1)[:, 1], path()["mean"].values[:, 1])

    def test_refusals(self):
        with pytest.raises(ValueError, match="no run 'run-9' in the latent; it has run-1"):
            plots.latents(xr.DataTree.from_dict({"run-1": path()}), runs=["run-9"])
        with pytest.raises(ValueError, match=r"needs 2 axes of shape \(2, 1\), found 1"):
            plots.latents(path(), axes=plt.gca())


class TestResponses:
    def test_curves_of_each_modality(self):
        rating = msrm.Gaussian(width=0.6, lag=0.5)
        axes = plots.responses({"brain": msrm.Identity(), "rating": rating})
        assert axes[0].get_title() == "brain\nIdentity"
        assert axes[1].get_title() == "rating\nGaussian (width 0.6, lag 0.5)"
        points = drawn(axes[1])
        np.testing.assert_array_equal(points[:, 1], rating.curve(points[:, 0]))
        # What the axis leaves out is below a thousandth of the peak.
        assert points[0, 0] < 0.5 - 0.6 * np.sqrt(2 * np.log(1e3))

    def test_bands_reference_and_participants(self):
        people = {"p1": msrm.Gaussian(width=0.6, lag=0.0), "p2": msrm.Gaussian(width=0.6, lag=0.5)}
        lags = np.linspace(-1, 1, 5)
        band = xr.Dataset({"lower": ("lag", lags * 0), "upper": ("lag", lags * 0 + 1)}, coords={"lag": lags})
        axes = plots.responses({"x": people}, bands={"x": band}, reference={"x": people["p1"]})
        assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["p1", "p2", "reference"]
        assert len(axes[0].collections) == 1

    def test_takes_a_fitted_model(self):
        class Fitted:
            responses_ = {"rating": msrm.Gaussian(width=0.6, lag=0.5)}  # noqa: RUF012

        assert plots.responses(Fitted()).shape == (1,)


class TestLoadings:
    def parameters(self):
        rng = np.random.default_rng(0)
        names = {"feature": ["joy", "fear", "calm"], "factor": [1, 2]}
        return {
            f"loading/{p}/{m}": xr.DataArray(rng.standard_normal((3, 2)), names, ("feature", "factor"))
            for p in ("p1", "p2")
            for m in ("rating", "brain")
        }

    def test_images_and_labels(self):
        parameters = self.parameters()
        axes = plots.loadings(parameters, modality="rating")
        np.testing.assert_array_equal(axes[1].images[0].get_array(), parameters["loading/p2/rating"].values)
        assert [label.get_text() for label in axes[0].get_yticklabels()] == ["joy", "fear", "calm"]
        low, high = axes[0].images[0].get_clim()
        assert low == -high

    def test_refusals(self):
        with pytest.raises(ValueError, match=r"which modality\? There are rating, brain"):
            plots.loadings(self.parameters())
        with pytest.raises(ValueError, match="'p9' has no loadings for 'brain'; those who have: p1, p2"):
            plots.loadings(self.parameters(), modality="brain", participants=["p9"])
        with pytest.raises(ValueError, match="no loadings for 'gsr'"):
            plots.loadings(self.parameters(), modality="gsr")


class TestObservedPredicted:
    def test_both_lines_and_their_correlation(self):
        times = np.arange(20.0)
        coords = {"time": times, "feature": ["joy", "fear"]}
        observed = xr.DataArray(np.c_[np.sin(times), np.cos(times)], coords, ("time", "feature"))
        mean = observed * 0.5 + 0.1 * np.sin(3 * times)[:, None]
        predicted = xr.Dataset({"mean": mean, "supported": ("time", times < 15)})
        axes = plots.observed_predicted(observed, predicted, features=["fear"])
        np.testing.assert_array_equal(drawn(axes[0])[:, 1], observed.sel(feature="fear"))
        correlation = np.corrcoef(observed[:15, 1], mean[:15, 1])[0, 1]
        assert axes[0].get_title(loc="right") == f"r = {correlation:.2f}"
        with pytest.raises(ValueError, match="feature 'sad' is not predicted; there are joy, fear"):
            plots.observed_predicted(observed, predicted, features=["sad"])


class TestConvergence:
    def test_distances_to_the_best_start(self):
        axis = plots.convergence([np.array([4.0, 3.0, 2.0]), np.array([4.0, 2.5])])
        np.testing.assert_allclose(drawn(axis, 0)[:, 1], [1.0, 0.5])
        np.testing.assert_allclose(drawn(axis, 1)[:, 1], [1.0, 0.25])
        assert axis.get_title() == "best objective 2"


def test_without_matplotlib_the_extra_is_named():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "try:\n    import msrm.plots\n"
        "except ImportError as error:\n    assert \"pip install 'msrm[plots]'\" in str(error)\n"
        "else:\n    raise SystemExit('imported')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
