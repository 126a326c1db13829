"""Breaking one part of the density that NUTS moves in makes a named exact test fail; Geweke's test is the second net.

Each entry of `MUTATIONS` breaks one part and names the test of test_nuts.py that must notice.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import test_nuts as named
from gibbs_problems import problem

import msrm
from msrm.gp.dense import Dense
from msrm.gp.nuts import coordinates, standins
from msrm.gp.nuts.coordinates import Coordinates
from msrm.gp.nuts.transforms import Scalars


def wide_case():
    """Two factors, features without data: every kind of coordinate."""
    small = problem(n_factors=2, wide=11, skin=False)
    return small, named.density_of(small, Dense(small.layout.groups, 2))


def scalars_without_jacobian(monkeypatch):
    """Bounded scalars move on the whole line under the density of their values."""
    monkeypatch.setattr(Scalars, "log_slope", lambda self, x: jnp.zeros(len(self.lower)))
    named.test_a_scalar_keeps_its_prior_on_the_whole_line(msrm.LogNormal(0.3, 0.5).bounded(0.5, 4.0))


def scalars_without_jacobian_in_the_density(monkeypatch):
    """As before, where the density calls it."""
    monkeypatch.setattr(Scalars, "log_slope", lambda self, x: jnp.zeros(len(self.lower)))
    named.test_the_density_is_the_brute_force_one(wide_case())


def diagonals_without_jacobian(monkeypatch):
    """Logarithms of chi diagonals move under the density of the diagonals."""
    real = Coordinates.log_prior
    monkeypatch.setattr(
        Coordinates, "log_prior", lambda self, x: real(self, x) - jnp.sum(jnp.where(self.degrees > 0.0, x, 0.0))
    )
    named.test_the_density_is_the_brute_force_one(wide_case())


def pivots_of_one_degree(monkeypatch):
    """Diagonals of the pivots keep the normal prior of a loading: the volume of the rotations is forgotten."""
    real = coordinates._Kinds.pivot

    def pivot(self, key, row, place):
        real(self, key, row, place)
        self.degrees[self.degrees > 0.0] = 1.0

    monkeypatch.setattr(coordinates._Kinds, "pivot", pivot)
    named.test_the_density_is_the_brute_force_one(wide_case())


def null_factors_of_equal_degrees(monkeypatch):
    """Bartlett's diagonals all with the degrees of the first."""
    real = coordinates._Kinds.factor

    def factor(self, key, runs, block):
        before = self.degrees.copy()
        real(self, key, runs, block)
        self.degrees[self.degrees != before] = block.count

    monkeypatch.setattr(coordinates._Kinds, "factor", factor)
    named.test_the_density_is_the_brute_force_one(wide_case())


def null_scalars_left_out(monkeypatch):
    """The likelihood counts the scalars of stand-ins, not of all features without data."""
    real = standins._extended
    monkeypatch.setattr(
        standins,
        "_extended",
        lambda pair, blocks: replace(made := real(pair, blocks), null_counts=np.zeros_like(made.null_counts)),
    )
    named.test_the_density_is_the_brute_force_one(wide_case())


def null_factors_transposed(monkeypatch):
    """Chains store columns of the null factor as if they were rows."""
    real = coordinates.stored_rows

    def stored(rows, blocks):
        turned = rows.copy()
        for block in blocks:
            turned[block.span] = rows[block.span].T
        return real(turned, blocks)

    monkeypatch.setattr(coordinates, "stored_rows", stored)
    named.test_a_state_comes_back_with_its_invariants(wide_case())


MUTATIONS = [
    scalars_without_jacobian,
    scalars_without_jacobian_in_the_density,
    diagonals_without_jacobian,
    pivots_of_one_degree,
    null_factors_of_equal_degrees,
    null_scalars_left_out,
    null_factors_transposed,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_breaking_a_part_of_the_density_fails_its_test(monkeypatch, mutation):
    with pytest.raises(AssertionError):
        mutation(monkeypatch)


def test_the_unbroken_density_passes():
    """Nothing here fails for another reason than the mutation."""
    case = wide_case()
    named.test_the_density_is_the_brute_force_one(case)
    named.test_a_state_comes_back_with_its_invariants(case)
