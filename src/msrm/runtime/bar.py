"""One progress bar for every long loop: on a terminal only, unless asked for or refused."""

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

__all__ = ["progress"]


def progress(work: Iterable[Any] | int, *, desc: str = "", enabled: bool | None = None) -> Any:
    """A tqdm bar over `work`, silent when standard error is not a terminal.

    Parameters
    ----------
    work : iterable or int
        What to iterate over, or a total to count up with ``bar.update(n)``.
    desc : str
        Text before the bar.
    enabled : bool, optional
        True draws always, False never; the default draws on a terminal only.

    Returns
    -------
    tqdm.tqdm
        Iterable over `work`; also a context manager with ``update`` and ``set_postfix_str``.

    Examples
    --------
    >>> [x for x in progress([1, 2], desc="runs", enabled=False)]
    [1, 2]
    """
    disable = None if enabled is None else not enabled
    if isinstance(work, int):
        return tqdm(total=work, desc=desc, disable=disable, leave=False)
    return tqdm(work, desc=desc, disable=disable, leave=False)
