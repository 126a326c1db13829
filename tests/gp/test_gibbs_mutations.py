"""Breaking one step of the Gibbs sampler makes a named exact test fail; Geweke's test is the second net.

Each entry of `MUTATIONS` breaks the sampler and names the test of test_gibbs.py that must notice. The order of the
sweep has its own pair of tests on sharp data in test_gibbs_joint.py.
"""

import numpy as np
import pytest
import test_gibbs as named
from gibbs_problems import problem

from msrm.gp.gibbs import moves
from msrm.gp.gibbs.conditionals import draw_null_factor
from msrm.gp.gibbs.design import Design, PairDesign
from msrm.gp.node_terms import JointTerms, NodeTerms, ResidualTerms


def latents_without_residuals(monkeypatch):
    """e_j in the likelihood, not in the functionals."""
    for kind in (ResidualTerms, JointTerms):
        monkeypatch.setattr(kind, "draw", NodeTerms.draw)
    named.test_states_and_functionals_have_the_moments_of_dense_conditioning(problem())


def null_rows_from_the_prior(monkeypatch):
    """Null rows from their prior instead of their conditional."""
    monkeypatch.setattr(named, "draw_null_factor", lambda rng, gram, *rest: draw_null_factor(rng, 0.0 * gram, *rest))
    named.test_the_null_factor_is_the_gram_matrix_of_so_many_rows(7)


def null_block_from_the_prior_in_the_sweep(monkeypatch):
    """As before, where the sweep calls it."""
    real = PairDesign.grams
    monkeypatch.setattr(PairDesign, "grams", lambda self, matrix: 0.0 * real(self, matrix))
    named.test_the_sweep_draws_null_rows_given_the_functionals()


def null_scalars_left_out_of_the_noise(monkeypatch):
    """The noise step counts features with data only."""
    members = property(lambda self: np.bincount(self.pattern[: self.pair.n_coordinates], minlength=len(self.present)))
    monkeypatch.setattr(PairDesign, "members", members)
    named.test_the_noise_step_sees_every_raw_residual()


def null_squares_left_out_of_the_noise(monkeypatch):
    """The noise step sums squares over features with data only."""
    real = PairDesign.squares

    def squares(self, matrix, rows):
        kept = np.arange(len(rows)) < self.pair.n_coordinates
        return real(self, matrix, rows * kept[:, None])

    monkeypatch.setattr(PairDesign, "squares", squares)
    named.test_the_noise_step_sees_every_raw_residual()


def no_jacobian(monkeypatch):
    monkeypatch.setattr(Design, "feature_rows", {"brain": 0, "rating": 0, "skin": 0})


def scale_without_jacobian(monkeypatch):
    """The scale move forgets the volume of the loadings."""
    no_jacobian(monkeypatch)
    named.test_the_scale_move_has_the_ratio_of_joint_densities(problem(), 0.3)


def scale_jacobian_without_null_rows(monkeypatch):
    """The scale move counts the loadings of features with data only."""
    rows = property(lambda self: {m: sum(p.pair.n_coordinates for p in self.members(m)) for m in self.modalities})
    monkeypatch.setattr(Design, "feature_rows", rows)
    named.test_the_scale_move_has_the_ratio_of_joint_densities(problem(wide=40), 0.3)


def response_without_jacobian(monkeypatch):
    """A response step forgets the volume of the loadings that it scales."""
    no_jacobian(monkeypatch)
    named.test_a_response_step_accepts_with_the_ratio_of_marginal_densities("one run")


def shift_without_compensation(monkeypatch):
    """Paths are shifted, offsets stay."""
    real = moves._raise
    monkeypatch.setattr(
        moves,
        "_raise",
        lambda current, patterns, seen, gains, column, delta: real(current, patterns, seen, gains, {}, delta),
    )
    named.test_the_shift_has_its_exact_normal_conditional(problem())


def shift_with_unit_gain(monkeypatch):
    """Offsets take the level itself, not what a response makes of it: unit energy is not unit mass."""
    monkeypatch.setattr(moves, "_gains", lambda current, seen, column: {modality: 1.0 for _, modality in seen})
    named.test_the_shift_moves_offsets_by_the_response_gain()


MUTATIONS = [
    latents_without_residuals,
    null_rows_from_the_prior,
    null_block_from_the_prior_in_the_sweep,
    null_scalars_left_out_of_the_noise,
    null_squares_left_out_of_the_noise,
    scale_without_jacobian,
    scale_jacobian_without_null_rows,
    response_without_jacobian,
    shift_without_compensation,
    shift_with_unit_gain,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_breaking_a_step_fails_its_test(monkeypatch, mutation):
    with pytest.raises(AssertionError):
        mutation(monkeypatch)
