"""Folders whose files are run as code: compilation caches must be their user's alone."""

import os
import stat
from pathlib import Path

__all__ = ["whose_else"]


def whose_else(folder: Path) -> str:
    """Who else can put files into a folder, for a message; empty where only this user can.

    Raises
    ------
    OSError
        If the folder is not there.
    """
    status = folder.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return f"another user owns {folder}"
    return f"others can write {folder}" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""
