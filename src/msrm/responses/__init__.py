"""Responses: the filters between the shared latent and each modality (DESIGN 2).

``families`` owns the formulas, ``cells`` the integrals over grid cells, ``integrate`` the rows of a stream on a grid.
"""

from msrm.responses.base import Free, Response
from msrm.responses.families import Gaussian, Identity
from msrm.responses.integrate import CellQuadrature, hat_rows, quadrature

__all__ = ["CellQuadrature", "Free", "Gaussian", "Identity", "Response", "hat_rows", "quadrature"]
