"""msrm.simulation: equal to the shared generator, and true to its own truth."""

import numpy as np
import pytest

import msrm


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
