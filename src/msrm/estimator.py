"""What every estimator shares with scikit-learn: arguments stored untouched, ``get_params``, ``set_params``, a repr.

Those that end in a fitted model share a :class:`Fit` of it.
"""

import inspect
from pathlib import Path
from typing import Any, Self

from msrm import archive


class NotFittedError(ValueError, AttributeError):
    """A fitted quantity was asked for before `fit`."""


class Estimator:
    """Base of the estimators: ``__init__`` stores its arguments, learned attributes end in ``_``."""

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there: says to fit first where a fit would set it."""
        own = inspect.getattr_static(type(self), name, None)
        if isinstance(own, property) and own.fget is not None:
            return own.fget(self)  # raises again what led here
        kind = type(self).__name__
        learned = name.endswith("_") and not name.startswith("_")
        if learned and not any(known.endswith("_") for known in self.__dict__):
            raise NotFittedError(f"This {kind} is not fitted yet; call fit(recording) first, which sets {name}.")
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")

    @classmethod
    def _argument_names(cls) -> tuple[str, ...]:
        return tuple(name for name in inspect.signature(cls.__init__).parameters if name != "self")

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments by name; ``deep`` is there for scikit-learn, arguments hold no estimators."""
        return {name: getattr(self, name) for name in self._argument_names()}

    def set_params(self, **params: Any) -> Self:
        """Replace constructor arguments.

        Raises
        ------
        ValueError
            For a name that the constructor does not have.
        """
        known = self._argument_names()
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"{type(self).__name__} has no argument {name!r}; it has {', '.join(known)}.")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self).__init__).parameters
        shown = [
            f"{name}={value!r}"
            for name, value in self.get_params().items()
            if value is not defaults[name].default and repr(value) != repr(defaults[name].default)
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


class Fit[Model]:
    """What estimators share once they are fitted: the model under ``model_``, copies with it, an archive."""

    def save(self, path: str | Path) -> Path:
        """Write the fit to one archive file, which `msrm.open_fit` reads; an existing file is replaced when whole."""
        return archive.save_fit(self, path)

    @property
    def _fitted(self) -> Model:
        if "model_" not in self.__dict__:
            raise NotFittedError(f"This {type(self).__name__} is not fitted yet; call fit(recording) first.")
        model: Model = self.__dict__["model_"]
        return model

    def _copy(self) -> Self:
        """Another estimator of the same fit."""
        out = object.__new__(type(self))
        out.__dict__.update(self.__dict__)
        return out
