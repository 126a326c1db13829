"""Pictures of fits and draws: latent paths, responses, loadings, predictions, convergence, predictive checks.

Every function takes xarray objects, a fitted model or draws, draws on the axes it is given (or on a new figure) and
returns the axes.
"""

from msrm.plots.chains import ranks, traces
from msrm.plots.checks import predictive_check
from msrm.plots.curves import response_bands, responses
from msrm.plots.forests import forest
from msrm.plots.paths import latents
from msrm.plots.predictions import observed_predicted
from msrm.plots.search import convergence
from msrm.plots.tables import loadings

__all__ = [
    "convergence",
    "forest",
    "latents",
    "loadings",
    "observed_predicted",
    "predictive_check",
    "ranks",
    "response_bands",
    "responses",
    "traces",
]
