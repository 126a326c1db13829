"""msrm.simulation: equal to the shared generator, and true to its own truth."""

import numpy as np
import pytest
from scipy.interpolate import CubicSpline

import msrm
from msrm.simulation import Modality


@pytest.mark.parametrize(
    "arguments",
    [
        {"features": 7, "seconds": 45.0},
        {"features": 360},
        {"features": 4, "factors": 2, "runs": 3, "seconds": 30.3, "seed": 5, "missing": 0.1},
    ],
)
def test_equals_the_shared_workload_bit_for_bit(workload, arguments):
    expected = workload.make(**arguments)
    recording, truth = msrm.simulate(**arguments)
    streams = {f"{s.participant}/{s.run}/{s.modality}": s for s in recording.streams()}
    assert streams.keys() == {key.removeprefix("times/") for key in expected if key.startswith("times/")}
    for name, stream in streams.items():
        np.testing.assert_array_equal(stream.values, expected[f"values/{name}"])
        np.testing.assert_array_equal(stream.times, expected[f"times/{name}"])
    for key in (key.removeprefix("truth/") for key in expected if key.startswith("truth/")):
        found = truth.latent[key.removeprefix("latent/")] if key.startswith("latent/") else truth.parameters[key]
        np.testing.assert_array_equal(found, expected[f"truth/{key}"])


def test_the_name_stays_a_function_after_the_module_was_imported():
    import msrm.simulation

    assert callable(msrm.simulate)
    assert callable(msrm.simulate)


class TestShapes:
    def test_any_participants(self):
        for participants, brains in ((1, 1), (2, 1), (3, 2)):
            recording, truth = msrm.simulate(features=3, participants=participants, seconds=20.0)
            assert len(recording.participants) == participants
            assert len(recording.streams(modality="brain")) == brains
            assert truth.latent["run-1"].sizes == {"time": 67, "factor": 3}
        assert truth.parameters["loading/p2/brain"].shape == (3, 3)
        assert "loading/p3/brain" not in truth.parameters

    def test_own_modalities(self):
        kinds = {
            "face": Modality(4, 0.5, noise_sd=0.1, participants=1),
            "scr": Modality(1, 0.25, msrm.Gaussian(width=0.5, lag=msrm.Free(1.0, bounds=(0.0, 2.0)))),
        }
        recording, truth = msrm.simulate(modalities=kinds, participants=2, runs=2, seconds=10.0, factors=2)
        assert recording.pairs == (("p1", "face"), ("p1", "scr"), ("p2", "scr"))
        assert recording.stream("p2", "run-2", "scr").times.tolist() == [0.25 * i for i in range(41)]
        assert truth.parameters["response/scr/lag"] == 1.0
        assert truth.parameters["noise/p1/face"] == pytest.approx(0.01, rel=1e-15)
        assert truth.responses["scr"] == msrm.Gaussian(width=0.5, lag=1.0)

    def test_gaps_take_rows_and_change_no_other_number(self):
        whole, _ = msrm.simulate(features=3, participants=2, seconds=200.0)
        gappy, _ = msrm.simulate(features=3, participants=2, seconds=200.0, gaps=2, gap_seconds=15.0)
        for before, after in zip(whole.streams(), gappy.streams(), strict=True):
            kept = np.isin(before.times, after.times)
            lost = before.times[~kept]
            np.testing.assert_array_equal(before.values[kept], after.values)
            assert 0 < lost.size <= 2 * (15 / np.diff(before.times)[0] + 1)
            assert np.diff(after.times).max() > 10 or lost[0] == 0 or lost[-1] == before.times[-1]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"missing": 1.0}, "Wanted 0 <= missing < 1"),
            ({"factors": 0}, "factors is at least 1; got 0"),
            ({"runs": 0}, "runs is at least 1"),
            ({"participants": 0}, "participants is at least 1"),
            ({"seconds": 0.0}, "positive gap_seconds, length_scale and seconds"),
            ({"features": 3, "modalities": {"a": Modality(1, 1.0)}}, "features=3 is of the default brain"),
            (
                {"seconds": 10.0, "gaps": 5, "gap_seconds": 40.0},
                r"'brain' of p1 in run-1 has 0 rows after 5 gaps of 40 s",
            ),
            ({"modalities": {}}, "An empty recording"),
        ],
    )
    def test_refusals(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            msrm.simulate(**arguments)

    def test_modalities_that_cannot_be(self):
        with pytest.raises(ValueError, match=r"multiple of 0\.05 s; got 0\.33 s"):
            Modality(2, 0.33)
        with pytest.raises(ValueError, match="at least one feature"):
            Modality(0, 1.0)


class TestTruth:
    def test_latent_is_matern_32_with_unit_variance(self):
        _, truth = msrm.simulate(features=1, factors=40, seconds=1500.0, participants=1, length_scale=2.0, seed=3)
        path = truth.latent["run-1"].values
        rate = np.sqrt(3) / 2.0
        for step in (0, 3, 10, 30):
            lag = 0.3 * step
            found = np.mean(path[: len(path) - step] * path[step:])
            expected = (1 + rate * lag) * np.exp(-rate * lag)
            # Integrated autocorrelation of products below 2 x 4 s: sd of the mean under sqrt(2 x 8 / (40 x 1500)).
            assert abs(found - expected) < 4 * np.sqrt(16 / 60000)

    @pytest.mark.parametrize(
        "response",
        [
            msrm.Identity(),
            msrm.Gaussian(width=0.6, lag=0.43),
            msrm.Gaussian(width=0.8, lag=-1.0),
            msrm.Gamma(shape=3.0, scale=0.7, lag=0.5),
            msrm.Bateman(rise=0.7, decay=2.0, lag=0.2),
            msrm.Sampled(lags=[0.0, 1.0, 2.5], values=[0.0, 1.0, 0.5]),
        ],
        ids=lambda response: type(response).__name__,
    )
    def test_streams_see_the_latent_through_the_response(self, response):
        kinds = {"a": Modality(6, 0.3, response, noise_sd=0.0)}
        recording, truth = msrm.simulate(modalities=kinds, participants=1, factors=2, seconds=300.0)
        stream = recording.stream("p1", "run-1", "a")
        loading, offset = truth.parameters["loading/p1/a"], truth.parameters["offset/p1/a"]
        seen = np.linalg.lstsq(loading, (stream.values - offset).T, rcond=None)[0].T
        latent = CubicSpline(truth.latent["run-1"]["time"].values, truth.latent["run-1"].values)
        if response.is_identity:
            expected = latent(stream.times)
        else:
            lags = np.linspace(*response.support(), 4001)
            inside = (stream.times > max(0, response.support()[1])) & (stream.times < 295)
            seen, times = seen[inside], stream.times[inside]
            expected = np.trapezoid(response.curve(lags)[:, None] * latent(times[:, None] - lags), lags, axis=1)
        # The spline through values every 0.3 s errs by up to 0.01, the grid of 0.05 s by less where the curve jumps.
        np.testing.assert_allclose(seen, expected, atol=0.03)
