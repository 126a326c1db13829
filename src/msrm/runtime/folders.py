"""Folders whose files are run as code: compilation caches must be their user's alone."""

import os
import stat
from pathlib import Path

__all__ = ["OTHER_CACHE", "whose_else"]

OTHER_CACHE = "set another JAX_COMPILATION_CACHE_DIR"


def whose_else(folder: Path) -> tuple[str, str] | None:
    """Who else can put files into a folder, for a message, and what to do; None where only this user can.

    Raises
    ------
    OSError
        If the folder is not there.
    """
    status = folder.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return f"another user owns {folder}", OTHER_CACHE
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write {folder}", f"chmod go-w {folder}"
    return None
