"""The command line (DESIGN 9). Commands and their help are in `msrm.cli.commands`, what they do in `msrm.cli.work`.

Nothing is imported here, so that Ctrl-C is answered in one line from the first moment on.
"""

import sys
from importlib import import_module
from typing import Any

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line."""
    try:
        import_module("msrm.cli.commands").main()
    except KeyboardInterrupt:
        print("msrm: interrupted", file=sys.stderr)
        sys.exit(130)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'msrm.cli' has no attribute {name!r}")
    return import_module("msrm.cli.commands").app
