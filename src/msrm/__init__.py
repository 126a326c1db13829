"""Multimodal shared response models: several people, one stimulus, several streams, one latent response.

Every public name is resolved on first use (PEP 562), so that ``import msrm`` costs nothing
and JAX is only needed by the Bayesian model.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "recording": ("Recording", "RecordingWarning", "RecordingWriter", "open_recording", "concat_runs"),
    "bids": ("read_bids",),
    "simulation": ("simulate",),
    "responses": ("Identity", "Gaussian", "Gamma", "DoubleGamma", "Bateman", "Sampled", "Free"),
    "priors": ("Normal", "LogNormal", "Uniform", "Priors"),
    "regularized": ("RMSRM",),
    "evaluation": ("score", "evaluate"),
    "archive": ("open_fit",),
}
_GP_HOMES = {
    "gp": ("GPMSRM", "Draws", "SampledGPMSRM"),
    "gp.runs": ("sample_runs",),
}
_SUBMODULES = ("runtime", "plots", "diagnostics", "evaluation", "gp", "fleet")
_OWNER = {name: module for module, names in (_HOMES | _GP_HOMES).items() for name in names}
_NEEDS_BAYESIAN = {name for names in _GP_HOMES.values() for name in names}

__all__ = ["__version__", *sorted(_OWNER)]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"msrm.{name}")
    if name not in _OWNER:
        raise AttributeError(f"module 'msrm' has no attribute {name!r}")
    if name in _NEEDS_BAYESIAN and find_spec("jax") is None:
        raise ImportError(f"msrm.{name} needs JAX, which is not installed. Run: pip install 'msrm[bayesian]'")
    return getattr(import_module(f"msrm.{_OWNER[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES])


if TYPE_CHECKING:
    from msrm.archive import open_fit as open_fit
    from msrm.bids import read_bids as read_bids
    from msrm.evaluation import evaluate as evaluate
    from msrm.evaluation import score as score
    from msrm.gp import GPMSRM as GPMSRM
    from msrm.gp import Draws as Draws
    from msrm.gp import SampledGPMSRM as SampledGPMSRM
    from msrm.gp.runs import sample_runs as sample_runs
    from msrm.priors import LogNormal as LogNormal
    from msrm.priors import Normal as Normal
    from msrm.priors import Priors as Priors
    from msrm.priors import Uniform as Uniform
    from msrm.recording import Recording as Recording
    from msrm.recording import RecordingWarning as RecordingWarning
    from msrm.recording import RecordingWriter as RecordingWriter
    from msrm.recording import concat_runs as concat_runs
    from msrm.recording import open_recording as open_recording
    from msrm.regularized import RMSRM as RMSRM
    from msrm.responses import Bateman as Bateman
    from msrm.responses import DoubleGamma as DoubleGamma
    from msrm.responses import Free as Free
    from msrm.responses import Gamma as Gamma
    from msrm.responses import Gaussian as Gaussian
    from msrm.responses import Identity as Identity
    from msrm.responses import Sampled as Sampled
    from msrm.simulation import simulate as simulate
