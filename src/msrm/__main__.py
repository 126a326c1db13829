"""``python -m msrm`` is the command ``msrm``."""

from msrm.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
