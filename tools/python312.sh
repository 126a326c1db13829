#!/bin/sh
# Print a Python >= 3.12, from PATH or ~/.pyenv/versions; say clearly if there is none.
for candidate in python3.12 python3.13 python3.14 python3 "$HOME"/.pyenv/versions/3.1[2-9]*/bin/python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
        "$candidate" -c 'import sys; print(sys.executable)'
        exit 0
    fi
done
echo "msrm needs Python 3.12 or newer; none was found on PATH or under ~/.pyenv/versions." >&2
echo "Install one (for example: pyenv install 3.12) and run make again." >&2
exit 1
