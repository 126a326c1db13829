"""Messages of `msrm.gp.sampling` and its stores, which speak of Python's arguments, in the words of ``msrm sample``."""

import re
import shlex
from collections.abc import Sequence

__all__ = ["NUTS_OPTIONS", "as_typed", "option"]

NUTS_OPTIONS = ("metric", "chain_method", "target_accept", "max_tree_depth")
_ARGUMENTS = ("sampler", "chains", "warmup", "draws", "seed", "path", "resume", "n_jobs", *NUTS_OPTIONS)
_OPTIONS = {name: "--" + name.removeprefix("n_").replace("_", "-") for name in _ARGUMENTS}
_NAMES = "|".join(_OPTIONS)
_VALUE = re.compile(rf"\b({_NAMES})=('[^']*'|\"[^\"]*\"|[\w+-]+(?:\.\d+)?)")
_FIRST = re.compile(rf"^(?:({_NAMES})(?:, )?)+(?= must|:)")
_GO_ON = re.compile(r"continue with path=('[^']*'|\"[^\"]*\"), resume=True")


def option(argument: str) -> str:
    """The option of an argument: ``--jobs`` of ``n_jobs``."""
    return _OPTIONS[argument]


def as_typed(message: str, words: Sequence[str]) -> str:
    """A message for someone who typed a command.

    Parameters
    ----------
    message : str
    words : sequence of str
        What was typed after ``msrm``; messages of other commands than ``sample`` stay as they are.
    """
    if list(words[:1]) != ["sample"]:
        return message
    before, *rest = _GO_ON.split(message, maxsplit=1)
    said = _FIRST.sub(_first, _VALUE.sub(_typed, before))
    if not rest:
        return said
    folder, after = rest
    named = any(word.split("=")[0] == "--path" for word in words)
    more = ([] if named else ["--path", folder[1:-1]]) + ([] if "--resume" in words else ["--resume"])
    return f"{said}continue with: {shlex.join(['msrm', *words, *more])}{after}"


def _typed(found: re.Match[str]) -> str:
    value = found[2].strip("'\"")
    return _OPTIONS[found[1]] + ("" if value == "True" else f" {shlex.quote(value)}")


def _first(found: re.Match[str]) -> str:
    return re.sub(rf"\b({_NAMES})\b", lambda name: _OPTIONS[name[0]], found[0])
