"""The convention for directions: factors on the principal axes of the loadings, ordered and signed (DESIGN 5)."""

import numpy as np

from msrm.gp.likelihood import Likelihood
from msrm.gp.parameters import Parameters


def principal(likelihood: Likelihood, parameters: Parameters) -> tuple[Parameters, np.ndarray, np.ndarray]:
    """Parameters with factors turned to the convention, their explained variance and their latent power.

    Turns Z and W by the eigenvectors of ``sum_pairs rows W'W / v``, largest first, each signed so that its loadings sum
    to a positive number. Likelihood and prior do not change.

    Returns
    -------
    Parameters
    explained : (factor,)
        Share of the (centred) data's sum of squares that each factor's posterior mean carries.
    power : (factor,)
        Mean of E[g^2] over the entries of Identity streams, or of all streams where there are none.
    """
    total = np.zeros((likelihood.specification.n_factors,) * 2)
    for pair in likelihood.nodes.pairs:
        name = f"{pair.participant}/{pair.modality}"
        loading = parameters[f"loading/{name}"]
        total += len(pair.times) * loading.T @ loading / float(parameters[f"noise/{name}"])
    turn = np.linalg.eigh(total)[1][:, ::-1]
    sums = sum(parameters[f"loading/{p.participant}/{p.modality}"].sum(axis=0) @ turn for p in likelihood.nodes.pairs)
    turn = turn * np.where(sums < 0.0, -1.0, 1.0)
    out = {name: value @ turn if name.startswith("loading/") else value for name, value in parameters.items()}
    return out, *_shares(likelihood, out)


def _shares(likelihood: Likelihood, parameters: Parameters) -> tuple[np.ndarray, np.ndarray]:
    _, _, moments = likelihood.value_gradient_moments(parameters)
    responses = likelihood.specification.responses
    size = likelihood.specification.n_factors
    identity = any(responses[pair.modality].is_identity for pair in likelihood.nodes.pairs)
    carried, whole, power, entries = np.zeros(size), 0.0, np.zeros(size), 0
    for pair in likelihood.nodes.pairs:
        name, seen = f"{pair.participant}/{pair.modality}", moments[pair.key]
        loading, count = parameters[f"loading/{name}"], max(len(pair.times), 1)
        centred = np.diagonal(seen.gram)[:-1] - seen.gram[:-1, -1] ** 2 / seen.gram[-1, -1]
        signal = np.sum(loading**2, axis=0) * centred
        carried += signal
        whole += float(np.sum(signal)) + seen.scalars * float(parameters[f"noise/{name}"])
        if responses[pair.modality].is_identity or not identity:
            power += np.diagonal(seen.gram)[:-1]
            entries += count
    return carried / whole, power / max(entries, 1)
