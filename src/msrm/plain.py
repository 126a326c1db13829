"""Responses and priors as plain data: what a settings file (TOML) and an archive (JSON) hold.

A response is a table with its ``family`` and that family's own arguments; a free parameter is a table with
``start``, ``bounds`` and, if wanted, ``prior``, a table with its own ``family``:

    [responses.rating]
    family = "Gaussian"
    width = 0.6
    lag = {start = 0.0, bounds = [-1.5, 1.5], prior = {family = "Normal", mean = 0.5, sd = 1.0}}
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import numpy as np

from msrm import responses
from msrm.priors import LogNormal, Normal, Prior, Priors, Uniform
from msrm.responses import Free, Response

__all__ = ["arguments_from_plain", "free_from_plain", "prior_from_plain", "response_from_plain", "to_plain"]

_RESPONSES = {
    name: kind
    for name, kind in vars(responses).items()
    if isinstance(kind, type) and issubclass(kind, Response) and kind is not Response
}
_PRIORS = {family.__name__: family for family in (Normal, LogNormal, Uniform)}


def to_plain(value: Response | Free | Prior | Any) -> Any:
    """A response, free parameter or prior as dictionaries, lists, numbers and text.

    Parameters
    ----------
    value : Response, Free or Prior
        Anything else is returned as it is, arrays and tuples as lists.

    Returns
    -------
    dict or plain value
        Arguments at their default are left out.

    Examples
    --------
    >>> to_plain(responses.Gaussian(width=0.6, lag=Free(0.0, bounds=(-1.5, 1.5))))
    {'family': 'Gaussian', 'width': 0.6, 'lag': {'start': 0.0, 'bounds': [-1.5, 1.5]}}
    """
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if not isinstance(value, Response | Free | Prior):
        return value
    plain = {} if isinstance(value, Free) else {"family": type(value).__name__}
    for field in fields(value):
        given = getattr(value, field.name)
        if not (given is None or (field.default is not MISSING and isinstance(given, str) and given == field.default)):
            plain[field.name] = to_plain(given)
    return plain


def arguments_from_plain(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A model's constructor arguments from plain tables: responses, priors, and free parameters wherever they are.

    Parameters
    ----------
    plain : mapping
        By argument: ``responses`` a table of tables by modality, ``priors`` a table of the standing priors, any other
        table with ``family`` a prior, with ``start`` a free parameter.

    Raises
    ------
    TypeError, ValueError
        As `response_from_plain`.
    """
    arguments = {name: _value_from_plain(value, name) for name, value in plain.items() if name != "responses"}
    if isinstance(arguments.get("priors"), Mapping):
        arguments["priors"] = _built(Priors, arguments["priors"], "priors")
    if "responses" in plain:
        tables = plain["responses"]
        if not isinstance(tables, Mapping) or not tables:
            raise ValueError("responses: give each modality a table, such as [responses.brain] family = 'Identity'")
        arguments["responses"] = {m: response_from_plain(table, f"responses.{m}") for m, table in tables.items()}
    return arguments


def _value_from_plain(value: Any, where: str) -> Any:
    """A prior or free parameter where a table is one, tables of them, and anything else as it is."""
    if not isinstance(value, Mapping):
        return value
    if "family" in value:
        return prior_from_plain(value, where)
    if "start" in value:
        return free_from_plain(value, where)
    return {name: _value_from_plain(item, f"{where}.{name}") for name, item in value.items()}


def response_from_plain(table: Mapping[str, Any], where: str) -> Response:
    """The response of a table; `where` names it in messages, for instance ``responses.rating``.

    Raises
    ------
    TypeError, ValueError
        For an unknown family or argument, a missing one, or a value that the family refuses; the message starts
        with `where`.
    """
    family, arguments = _family(table, _RESPONSES, where)
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            arguments[name] = free_from_plain(value, f"{where}.{name}")
        elif isinstance(value, list):
            arguments[name] = np.asarray(value, dtype=float)
    return _built(family, arguments, where)


def prior_from_plain(table: Mapping[str, Any], where: str) -> Prior:
    """The prior of a table with ``family`` and its arguments.

    Raises
    ------
    TypeError, ValueError
        As `response_from_plain`.
    """
    family, arguments = _family(table, _PRIORS, where)
    return _built(family, arguments, where)


def free_from_plain(table: Mapping[str, Any], where: str) -> Free:
    """A free parameter of ``start``, ``bounds`` and perhaps ``prior``."""
    arguments = dict(table)
    if isinstance(arguments.get("prior"), Mapping):
        arguments["prior"] = prior_from_plain(arguments["prior"], f"{where}.prior")
    if isinstance(arguments.get("bounds"), list):
        arguments["bounds"] = tuple(arguments["bounds"])
    return _built(Free, arguments, where)


def _family(table: Mapping[str, Any], families: Mapping[str, type], where: str) -> tuple[type, dict[str, Any]]:
    """The class a table names, and the rest of the table."""
    if not isinstance(table, Mapping):
        raise TypeError(f"{where} must be a table with a family, such as {{family = 'Identity'}}; found {table!r}")
    arguments = dict(table)
    name = arguments.pop("family", None)
    if name not in families:
        raise ValueError(f"{where}.family must be one of {', '.join(families)}; found {name!r}")
    return families[name], arguments


def _built(kind: type, arguments: dict[str, Any], where: str) -> Any:
    """`kind(**arguments)` with every refusal saying where."""
    known = {field.name: field for field in fields(kind) if field.init}
    if unknown := [name for name in arguments if name not in known]:
        raise ValueError(f"{where}.{unknown[0]} is unknown; {kind.__name__} has {', '.join(known)}")
    needed = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in needed if name not in arguments]:
        raise ValueError(f"{where}.{missing[0]} is missing; {kind.__name__} needs {', '.join(needed)}")
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from error
