"""The rotation of the factors, removed exactly: K pivot rows of the loadings lower triangular, diagonal positive.

Under ``W ~ N(0, s^2)`` every W is ``L Q`` on its pivot rows with Q orthogonal and L lower triangular. Q is uniform and
independent of L and of the other rows of ``W Q'``, which keep their prior; ``L_ii ~ s chi(K - i + 1)`` for i = 1..K and
``L_ij ~ N(0, s^2)`` below (Bartlett 1933). Likelihood and prior do not see Q, so chains move in L and ``W Q'`` and a
uniform Q is drawn afterwards.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import qr

from msrm.gp.data import Key

__all__ = ["pivot_rows", "turn_to_pivots"]

Array = NDArray[np.float64]
Pivots = tuple[tuple[Key, int], ...]


def pivot_rows(loadings: Mapping[Key, Array], noise: Mapping[Key, float]) -> Pivots:
    """The K loading rows that hold the factors best, by QR with column pivoting of all rows over their noise sd.

    Parameters
    ----------
    loadings : {(participant, modality): (coordinate, K)}
        Without stand-ins of null rows, whose prior is another.
    noise : {(participant, modality): float}

    Returns
    -------
    tuple of ((participant, modality), coordinate)

    Raises
    ------
    ValueError
        When there are fewer rows than factors.
    """
    places = [(key, row) for key, loading in loadings.items() for row in range(len(loading))]
    rows = np.concatenate([loading / np.sqrt(noise[key]) for key, loading in loadings.items()])
    size = rows.shape[1]
    if len(rows) < size:
        raise ValueError(
            f"NUTS takes the rotation out by {size} loading rows, one a factor, but the streams have {len(rows)}. Use "
            f'sampler="gibbs", or at most {len(rows)} factors.'
        )
    order = qr(rows.T, mode="r", pivoting=True)[1]
    return tuple(places[place] for place in order[:size])


def turn_to_pivots(loadings: Mapping[Key, Array], pivots: Pivots) -> Array:
    """The orthogonal matrix (K, K) that makes the pivot rows lower triangular with positive diagonal: ``W @ turn``."""
    held = np.stack([loadings[key][row] for key, row in pivots])
    turn, upper = np.linalg.qr(held.T)
    return turn * np.where(np.diag(upper) < 0.0, -1.0, 1.0)
