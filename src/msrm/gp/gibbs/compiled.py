"""Which models the compiled Gibbs sampler has (:mod:`msrm.gp.gibbs.native`); no JAX here."""

import numpy as np

from msrm.gp.data import NodeLayout
from msrm.gp.parameters import FreeLengthScale, Specification
from msrm.priors import LogNormal, Normal, Uniform

__all__ = ["unsupported"]


def unsupported(specification: Specification, layout: NodeLayout) -> str:
    """Which part of a model the compiled sampler does not have; empty when it has all."""
    noise = specification.priors.noise
    free = [one.bounded_prior for response in specification.responses.values() for one in response.free.values()]
    asked = {
        "a free length scale": isinstance(specification.length_scale, FreeLengthScale),
        "run offsets": bool(specification.run_offsets),
        "Ornstein-Uhlenbeck residuals": any(specification.residual(pair.modality).differenced for pair in layout.pairs),
        "missing entries": any(
            not rows.complete or rows.present.shape[0] > 1 or not rows.plain for rows in layout.rows.values()
        ),
        "a noise prior other than LogNormal without bounds": not (
            isinstance(noise, LogNormal) and noise.lower <= 0.0 and np.isinf(noise.upper)
        ),
        "a response prior other than Normal, LogNormal or Uniform": not all(
            isinstance(prior, Normal | LogNormal | Uniform) for prior in free
        ),
    }
    return ", ".join(name for name, has in asked.items() if has)
