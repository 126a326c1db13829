"""GP-MSRM: the Gaussian-process model, its likelihood backends, and inference (DESIGN 2 to 5)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {"Draws": "draws", "GPMSRM": "estimator", "SampledGPMSRM": "sampled", "UnitsWarning": "model"}

__all__ = ["GPMSRM", "Draws", "UnitsWarning"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'msrm.gp' has no attribute {name!r}")
    return getattr(import_module(f"msrm.gp.{_HOMES[name]}"), name)


if TYPE_CHECKING:
    from msrm.gp.draws import Draws as Draws
    from msrm.gp.estimator import GPMSRM as GPMSRM
    from msrm.gp.model import UnitsWarning as UnitsWarning
    from msrm.gp.sampled import SampledGPMSRM as SampledGPMSRM
