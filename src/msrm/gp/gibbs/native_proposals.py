"""Proposals of the compiled Gibbs sampler for response parameters: the traced twin of `msrm.gp.gibbs.proposals`.

Independence proposals have heavy tails, and one far out would ask for larger windows, compiled anew. They are made
between points with supports up to `ROOM` times those at the start only, to there and from there, which keeps the
balance; walks go anywhere.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from msrm.gp.gibbs.marginal import Block
from msrm.gp.gibbs.native_data import log_prior

__all__ = ["ROOM", "Step", "Tuning", "at_coordinates", "learned", "suggested"]

ROOM = 1.5  # also of the first windows
Responses = dict[str, dict[str, Array]]
_DEGREES = 5
_TARGET = 0.35
_DECAY = 0.6


class Tuning(NamedTuple):
    """The proposal of one block (`msrm.gp.gibbs.proposals.BlockProposal`), without the length of its walk.

    Attributes
    ----------
    root, inverse : (d, d)
        Of the covariance, and its inverse.
    mean : (d,)
    fitted : () bool
    share : ()
        Of independence proposals.
    """

    root: Array
    inverse: Array
    mean: Array
    fitted: Array
    share: Array


class Step(NamedTuple):
    """How a step on the latent-marginal density went: its acceptance probability, whether an independence proposal was
    made, whether a support outgrew its windows, and the log likelihood after it."""

    probability: Array
    independent: Array
    outgrown: Array
    value: Array


def suggested(
    block: Block,
    length: Callable[[Responses], Array],
    key: Array,
    responses: Responses,
    tuning: Tuning,
    log_size: Array,
) -> tuple[Responses, Array, Array]:
    """Responses with a proposal of one block, log of prior and proposal ratio, whether it is of the fitted kind.

    ``length`` is that of the block's support over the one at the start.
    """
    kind, normals, heavy = jax.random.split(key, 3)
    values = [responses[block.modalities[0]][name] for name in _names(block)]
    here = jnp.stack([jnp.log(v) if log else v for v, log in zip(values, block.logarithmic, strict=True)])
    standard = tuning.root @ jax.random.normal(normals, here.shape)
    spread = jnp.sqrt((jax.random.normal(heavy, (_DEGREES,)) ** 2).sum() / _DEGREES)
    independent = tuning.fitted & (jax.random.uniform(kind) < tuning.share)
    there = jnp.where(independent, tuning.mean + standard / spread, here + jnp.exp(log_size) * standard)
    near = jnp.maximum(length(responses), length(at_coordinates(block, responses, there))) <= ROOM
    heavy_ratio = jnp.where(near, _heavy(tuning, here) - _heavy(tuning, there), -jnp.inf)
    ratio = jnp.where(independent, heavy_ratio, 0.0)
    ratio = ratio + _block_prior(block, there) - _block_prior(block, here)
    return at_coordinates(block, responses, jnp.where(jnp.isfinite(ratio), there, here)), ratio, independent


def _names(block: Block) -> list[str]:
    """Parameters of a block, without their modality."""
    return [name.rsplit("/", 1)[1] for name in block.names]


def at_coordinates(block: Block, responses: Responses, coordinates: Array) -> Responses:
    """Responses with one block at other coordinates."""
    values = zip(_names(block), coordinates, block.logarithmic, strict=True)
    return responses | {block.modalities[0]: {name: jnp.exp(x) if log else x for name, x, log in values}}


def learned(walks: Array, place: Array, told: Step, tune: Array) -> Array:
    """Walks after a step of block ``place - 1``: lengths move towards the acceptance aimed at."""
    own = jnp.arange(len(walks)) == place - 1
    learns = (own & tune & ~told.independent)[:, None]
    seen = walks[:, 1] + 1.0
    moved = walks[:, 0] + (told.probability - _TARGET) / seen**_DECAY
    return jnp.where(learns, jnp.stack([moved, seen], -1), walks)


def _heavy(tuning: Tuning, x: Array) -> Array:
    """Log density of the independence proposal up to a constant."""
    scaled = tuning.inverse @ (x - tuning.mean)
    return -0.5 * (_DEGREES + x.shape[0]) * jnp.log1p(scaled @ scaled / _DEGREES)


def _block_prior(block: Block, coordinates: Array) -> Array:
    """Log prior density of a block's coordinates, minus infinity outside the bounds."""
    total = jnp.zeros(())
    for x, log, prior in zip(coordinates, block.logarithmic, block.priors, strict=True):
        total = total + log_prior(prior, jnp.exp(x) if log else x) + (x if log else 0.0)
    return total
