"""Warnings that point at the line of the caller's own script, however deep in the package they arise."""

import warnings
from pathlib import Path

__all__ = ["warn_caller"]

_PACKAGE = str(Path(__file__).parent)


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn of something on behalf of the first caller outside the package."""
    warnings.warn(message, category, skip_file_prefixes=(_PACKAGE,))
