"""Responses and priors survive plain data, and every wrong table is refused by name."""

import json

import numpy as np
import pytest

import msrm
from msrm.plain import response_from_plain, to_plain

RESPONSES = [
    msrm.Identity(),
    msrm.Gaussian(width=0.6, lag=0.5),
    msrm.Gaussian(
        width=msrm.Free(0.6, bounds=(0.2, 2.0), prior=msrm.LogNormal(-0.5, 0.3)),
        lag=msrm.Free(0.1, bounds=(-1.5, 1.5), prior=msrm.Normal(0.5, 1.0)),
        pooling="partial",
        pooling_strength=0.1,
    ),
    msrm.Bateman(rise=0.7, decay=msrm.Free(4.0, bounds=(1.0, 9.0)), lag=0.5),
    msrm.Sampled(lags=np.array([0.0, 0.5, 1.0]), values=np.array([0.0, 1.0, 0.5])),
]


@pytest.mark.parametrize("response", RESPONSES, ids=repr)
def test_round_trip_through_json(response):
    plain = json.loads(json.dumps(to_plain(response)))
    again = response_from_plain(plain, "responses.x")
    assert repr(again) == repr(response)
    if not response.is_identity:
        u = np.linspace(-2.0, 2.0, 9)
        np.testing.assert_array_equal(again.curve(u), response.curve(u))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"family": "Gauss"}, r"responses\.rating\.family must be one of .*Identity.*found 'Gauss'"),
        ({"width": 1.0}, r"responses\.rating\.family must be one of .*found None"),
        (
            {"family": "Gaussian", "widht": 0.6, "lag": 0.0},
            r"responses\.rating\.widht is unknown; Gaussian has .*width, lag",
        ),
        ({"family": "Gaussian", "lag": 0.0}, r"responses\.rating\.width is missing"),
        ({"family": "Gaussian", "width": -1.0, "lag": 0.0}, r"responses\.rating: Gaussian: width"),
        ({"family": "Gaussian", "width": 1.0, "lag": {"start": 0.0}}, r"responses\.rating\.lag\.bounds is missing"),
        (
            {"family": "Gaussian", "width": 1.0, "lag": {"start": 0.0, "bounds": [-1, 1], "prior": {"family": "N"}}},
            r"responses\.rating\.lag\.prior\.family must be one of Normal, LogNormal, Uniform",
        ),
        ({"family": "Gaussian", "width": 1.0, "lag": {"start": 3.0, "bounds": [-1, 1]}}, r"rating\.lag: Free: start"),
    ],
)
def test_wrong_tables_are_refused_by_name(table, message):
    with pytest.raises(ValueError, match=message):
        response_from_plain(table, "responses.rating")


def test_a_response_that_is_no_table():
    with pytest.raises(TypeError, match=r"responses\.rating must be a table with a family"):
        response_from_plain("Gaussian", "responses.rating")
