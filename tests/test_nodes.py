"""Usable rows: the rule of DESIGN 2 for both edges, and what is refused."""

import numpy as np
import pytest

from msrm.nodes import GroupStatistics, NodeGroup, usable_rows
from msrm.recording import Recording
from msrm.responses import Free, Gaussian, Identity

RESPONSES = {"brain": Identity(), "rating": Gaussian(width=0.5, lag=Free(0.0, bounds=(-1.0, 2.0)))}


def recording_of(rating_times: np.ndarray, brain_values: np.ndarray | None = None) -> Recording:
    brain = np.arange(0.0, 20.5, 0.5)
    values = np.sin(brain)[:, None] if brain_values is None else brain_values
    rating = np.cos(rating_times)[:, None]
    return Recording.from_dict({"p1": {"run-1": {"brain": (values, brain), "rating": (rating, rating_times)}}})


def test_trim_keeps_rows_whose_envelope_lies_in_the_observed_domain():
    # The envelope is lag bounds +- 6 widths: from -4 to 5 s, so rows from 5 to 16 s; a nanosecond outside is inside.
    times = np.array([1.0, 4.9, 5.0 - 5e-10, 5.5, 10.0, 16.0, 16.1, 20.0])
    usable = usable_rows(recording_of(times), RESPONSES, edges="trim")
    assert usable.domains == {"run-1": (0.0, 20.0)}
    np.testing.assert_array_equal(usable.rows["p1", "run-1", "rating"], [0, 0, 1, 1, 1, 1, 0, 0])
    assert usable.rows["p1", "run-1", "brain"].all()


def test_extend_keeps_every_row_with_a_finite_entry():
    values = np.sin(np.arange(0.0, 20.5, 0.5))[:, None].copy()
    values[[0, 3, 40]] = np.nan
    recording = recording_of(np.array([1.0, 19.0]), values)
    usable = usable_rows(recording, RESPONSES, edges="extend")
    assert usable.rows["p1", "run-1", "rating"].all()
    np.testing.assert_array_equal(np.flatnonzero(~usable.rows["p1", "run-1", "brain"]), [0, 3, 40])
    assert usable.domains["run-1"] == (0.5, 19.5)


def test_domain_is_that_of_the_modalities_that_take_part():
    recording = recording_of(np.array([1.0, 9.0, 12.0]))
    assert usable_rows(recording, RESPONSES, edges="extend", modalities=["rating"]).domains["run-1"] == (1.0, 12.0)


def test_refusals_name_the_stream_and_the_remedy():
    with pytest.raises(
        ValueError, match=r"'rating' of p1 in run-1: no usable row.*-4 to 5 s.*0 to 20 s.*edges='extend'"
    ):
        usable_rows(recording_of(np.array([1.0, 19.0])), RESPONSES, edges="trim")
    with pytest.raises(ValueError, match="Modality 'rating' has no response; there are brain"):
        usable_rows(recording_of(np.array([9.0, 10.0])), {"brain": Identity()}, edges="trim")
    with pytest.raises(ValueError, match="edges must be 'trim' or 'extend', found 'cut'"):
        usable_rows(recording_of(np.array([9.0, 10.0])), RESPONSES, edges="cut")


def test_groups_and_statistics_count_nodes():
    times = np.arange(4.0)
    assert NodeGroup("brain", times, Identity()).n_nodes == 4
    assert NodeGroup("brain", times, Identity(), np.array([[0, 0], [1, 0]])).n_nodes == 2
    statistics = GroupStatistics(np.zeros((3, 1, 1)), np.array([0, 2, 2, 0]), np.zeros((4, 1)))
    np.testing.assert_array_equal(statistics.counts, [2, 0, 2])
