"""Settings of a fit from a TOML file and ``--set``: merged, every name checked, turned into an estimator."""

import inspect
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msrm
from msrm.archive import FITTED
from msrm.plain import arguments_from_plain

__all__ = ["estimator_of", "read_settings"]


def read_settings(
    config: Path | None, assignments: Sequence[str] | None, flags: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the estimator, and the part of the recording to use.

    Parameters
    ----------
    config : Path, optional
        A TOML file.
    assignments : sequence of str, optional
        ``name=value`` with a TOML value; dots reach into tables. They win over the file.
    flags : {name: value}
        Options of the command line; those that are not None win over everything.

    Returns
    -------
    settings, selection : dict
        Constructor arguments as plain tables, and the table ``recording``.

    Raises
    ------
    FileNotFoundError
        When there is no such file.
    ValueError
        For text that is no TOML, with file and place, or an unknown name, with those that exist.
    """
    settings: dict[str, Any] = {}
    if config is not None:
        if not config.is_file():
            raise FileNotFoundError(f"{config}: no such settings file")
        try:
            settings = tomllib.loads(config.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{config}: {error}") from error
    places: dict[str, str] = {}
    for assignment in assignments or ():
        table = _assigned(assignment)
        places |= dict.fromkeys(table, f"--set {assignment}")
        _merge(settings, table)
    settings |= {name: value for name, value in flags.items() if value is not None}
    selection = settings.pop("recording", {})
    source = config or "the settings"
    model = settings.get("model", FITTED[0])
    if model not in FITTED:
        raise ValueError(f"{places.get('model', source)}: model must be one of {', '.join(FITTED)}, found {model!r}")
    known = ["model", *inspect.signature(getattr(msrm, model)).parameters]
    if unknown := [name for name in settings if name not in known]:
        place, names = places.get(unknown[0], source), ", ".join(sorted([*known, "recording"]))
        raise ValueError(f"{place}: {unknown[0]!r} is unknown to {model}; it has {names}")
    if not isinstance(selection, dict):
        place = places.get("recording", source)
        raise ValueError(f"{place}: 'recording' must be a table, such as [recording] runs = ['run-1']")
    return settings, selection


def estimator_of(settings: Mapping[str, Any]) -> Any:
    """An unfitted model with these settings; `model` names its class.

    Raises
    ------
    TypeError, ValueError
        For a response or prior that its family refuses, named by its place.
    """
    arguments = dict(settings)
    kind = getattr(msrm, arguments.pop("model", FITTED[0]))
    return kind(**arguments_from_plain({"responses": {}} | arguments))


def _assigned(assignment: str) -> dict[str, Any]:
    """The table of one ``name=value``; a value that is no TOML is text."""
    name, equals, value = assignment.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"--set {assignment}: wanted NAME=VALUE, such as loading_ridge=1e-2")
    try:
        return tomllib.loads(f"{name.strip()} = {value}")
    except tomllib.TOMLDecodeError:
        pass
    try:
        return tomllib.loads(f"{name.strip()} = {_quoted(value)}")
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"--set {assignment}: {error}") from error


def _quoted(value: str) -> str:
    """A TOML string."""
    return '"' + value.strip().replace("\\", "\\\\").replace('"', '\\"') + '"'


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Put `new` over `into`, table by table; a table that names a family replaces the other family's arguments."""
    for name, value in new.items():
        if isinstance(value, Mapping) and "family" not in value and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value
