"""Responses: the filters between the shared latent and each modality (DESIGN 2).

``base`` owns what they share; ``families``, ``gamma`` and ``bateman`` the formulas; ``cells`` and ``onset`` the
integrals over grid cells; ``integrate`` the rows of a stream on a grid.
"""

from msrm.responses.base import Free, Response, Values
from msrm.responses.bateman import Bateman
from msrm.responses.families import Gaussian, Identity, Sampled
from msrm.responses.gamma import DoubleGamma, Gamma
from msrm.responses.integrate import CellQuadrature, hat_rows, quadrature

__all__ = [
    "Bateman",
    "CellQuadrature",
    "DoubleGamma",
    "Free",
    "Gamma",
    "Gaussian",
    "Identity",
    "Response",
    "Sampled",
    "Values",
    "hat_rows",
    "quadrature",
]
