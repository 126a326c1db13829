"""The table of all quantities, computed in blocks on every usable core, and the sampler's own statistics.

Memory is that of the draws plus a few megabytes a core: variables are read block by block, never copied whole.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from msrm.diagnostics.estimators import bfmi, block_statistics
from msrm.diagnostics.verdict import Thresholds, verdict
from msrm.runtime import available_cores, blas_threads

__all__ = ["Summary", "summary"]

# Values of a block: 64 quantities of 4 x 1,200 draws, more of shorter runs; a dozen such arrays are held at a time.
_BLOCK_VALUES, _MOST_TOGETHER = 64 * 4800, 512
# glibc takes arrays above a threshold from fresh pages, which the kernel clears, and raises the threshold to whatever
# such array was freed, 32 MB at most. One freed array saves the temporaries of all blocks a third of their time.
_FREED_BYTES = 31 << 20
_PROBLEMS = np.array(["", "stuck", "not finite", "too few draws"])


@dataclass(frozen=True)
class Summary:
    """Convergence of every quantity, and what to do about it.

    Attributes
    ----------
    table : xarray.Dataset
        mean, sd, q5, median, q95, mcse_mean, mcse_sd, ess_bulk, ess_tail, r_hat and `problem` (empty, "stuck",
        "not finite" or "too few draws") over the dimension `quantity`.
    sampler : dict
        Of the sampler itself, as far as recorded: `bfmi` (chain,), `divergences`, `saturated_trees`,
        `max_tree_depth`, `mean_tree_depth`.
    converged : bool
        True only when every check passed.
    verdict : str
        In plain words: what has not converged, and what to do.
    """

    table: xr.Dataset
    sampler: dict[str, Any]
    converged: bool
    verdict: str

    def worst(self, n: int = 10) -> xr.Dataset:
        """The `n` quantities that are furthest from converged: those with a problem, then by bulk ESS.

        Parameters
        ----------
        n : int
            How many rows.
        """
        order = np.lexsort((np.minimum(self.table.ess_bulk, self.table.ess_tail), self.table.problem == ""))
        return self.table.isel(quantity=order[:n])

    def __str__(self) -> str:
        rows = self.worst(8)
        width = max(8, *(len(str(name)) for name in rows.quantity.values))
        lines = [
            self.verdict,
            "",
            f"{'quantity':{width}}  {'mean':>11} {'sd':>10} {'ess_bulk':>9} {'ess_tail':>9} r_hat",
        ]
        for i, name in enumerate(rows.quantity.values):
            mean, sd, bulk, tail, r_hat = (
                float(rows[key][i]) for key in ("mean", "sd", "ess_bulk", "ess_tail", "r_hat")
            )
            lines.append(f"{name!s:{width}}  {mean:11.5g} {sd:10.4g} {bulk:9.0f} {tail:9.0f} {r_hat:.3f}")
        return "\n".join(lines)


def summary(
    draws: Any,
    *,
    tail_prob: float = 0.89,
    r_hat: float = 1.01,
    ess_per_chain: float = 100.0,
    bfmi_minimum: float = 0.3,
    n_jobs: int | None = None,
) -> Summary:
    """Summarize draws: location, Monte Carlo error, rank-normalized split R-hat, bulk and tail ESS, verdict.

    Parameters
    ----------
    draws : Draws, xarray.DataTree, xarray.Dataset, xarray.DataArray or array
        Draws with a `tree`, a tree with the groups `posterior` and perhaps `sample_stats`, a dataset or array with
        the dimensions chain and draw, or a plain array (chain, draw, ...).
    tail_prob : float
        Tail ESS is the smaller of those of the quantiles `tail_prob` and ``1 - tail_prob``; 0.89 is ArviZ's default.
    r_hat, ess_per_chain, bfmi_minimum : float
        Thresholds of the verdict: R-hat at most, bulk and tail ESS per chain at least, BFMI at least.
    n_jobs : int, optional
        Threads; by default the cores this process may use.

    Returns
    -------
    Summary
        `table`, `sampler`, `converged` and `verdict`.

    Raises
    ------
    ValueError
        When a variable lacks chain or draw, an array has fewer than two dimensions, or nothing is there to judge: no
        quantity, no chain or no draw. One to three draws are summarized, as "too few draws".

    Examples
    --------
    >>> import numpy as np
    >>> draws = np.random.default_rng(0).standard_normal((4, 1000, 3))
    >>> summary(draws).converged
    True
    >>> draws[1] = 0.0
    >>> print(summary(draws).verdict.splitlines()[0])
    NOT CONVERGED: 3 of 3 quantities.
    """
    if not 0.5 < tail_prob < 1:
        raise ValueError(f"tail_prob must lie between 0.5 and 1, found {tail_prob}")
    posterior, stats = _groups(draws)
    names: list[NDArray] = []
    blocks: list[tuple[NDArray | xr.DataArray, slice]] = []
    for name, variable in posterior.data_vars.items():
        names.append(_labels(str(name), variable))
        blocks.extend((variable, part) for part in _parts(variable))
    if not blocks:
        raise ValueError("the draws hold no quantity to summarize: the posterior group is empty")
    chains, drawn = posterior.sizes["chain"], posterior.sizes["draw"]
    if not chains * drawn:
        raise ValueError(f"no draws to summarize: {chains} chains of {drawn} draws; at least 4 a chain can be judged")
    workers = n_jobs or available_cores()
    np.empty(_FREED_BYTES, np.uint8)
    with blas_threads(1), ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda item: block_statistics(_block(*item), tail_prob=tail_prob), blocks))
    quantity = np.concatenate(names)
    columns = {key: np.concatenate([result[key] for result in results]) for key in results[0]}
    problem = columns.pop("problem").astype(np.intp)
    table = xr.Dataset(
        {key: ("quantity", values) for key, values in columns.items()} | {"problem": ("quantity", _PROBLEMS[problem])},
        coords={"quantity": quantity},
        attrs={"chains": chains, "draws": drawn, "tail_prob": tail_prob},
    )
    sampler = _sampler_statistics(stats)
    converged, words = verdict(table, sampler, Thresholds(r_hat, ess_per_chain, bfmi_minimum))
    return Summary(table, sampler, converged, words)


def _groups(draws: Any) -> tuple[xr.Dataset, xr.Dataset]:
    """The posterior and the sampler's statistics of whatever was passed, both over (chain, draw, ...)."""
    tree = getattr(draws, "tree", draws)
    stats = xr.Dataset()
    if isinstance(tree, xr.DataTree):
        if "posterior" not in tree.children:
            raise ValueError(f"the tree has no group 'posterior', it has {sorted(tree.children)}")
        stats = tree["sample_stats"].to_dataset() if "sample_stats" in tree.children else stats
        posterior = tree["posterior"].to_dataset()
    elif isinstance(tree, xr.Dataset):
        posterior = tree
    elif isinstance(tree, xr.DataArray):
        posterior = tree.to_dataset(name=tree.name or "x")
    else:
        posterior = _array_dataset(tree)
    for name, variable in posterior.data_vars.items():
        if not {"chain", "draw"} <= set(variable.dims):
            raise ValueError(f"{name!r} has the dimensions {variable.dims}; chain and draw are needed")
    return posterior, stats


def _array_dataset(values: ArrayLike) -> xr.Dataset:
    array = np.asarray(values)
    if array.ndim < 2:
        raise ValueError(f"an array of draws is (chain, draw, ...), found shape {array.shape}")
    dims = ("chain", "draw", *(f"x_dim_{i}" for i in range(array.ndim - 2)))
    return xr.Dataset({"x": (dims, array)})


def _labels(name: str, variable: xr.DataArray) -> NDArray:
    """`name` for a scalar, else name[a, b] with the coordinates of the other dimensions, in C order."""
    dims = [dim for dim in variable.dims if dim not in ("chain", "draw")]
    if not dims:
        return np.array([name])
    axes = [[str(value) for value in variable[dim].values] for dim in dims]
    return np.array([f"{name}[{', '.join(labels)}]" for labels in product(*axes)], dtype=np.dtypes.StringDType())


def _parts(variable: xr.DataArray) -> Iterator[slice]:
    count = int(np.prod([size for dim, size in variable.sizes.items() if dim not in ("chain", "draw")]))
    draws = max(1, variable.sizes["chain"] * variable.sizes["draw"])
    together = min(max(1, _BLOCK_VALUES // draws), _MOST_TOGETHER)
    for start in range(0, count, together):
        yield slice(start, min(start + together, count))


def _block(variable: xr.DataArray, part: slice) -> NDArray[np.float64]:
    """(quantity, chain, draw) of a contiguous range of the flattened other dimensions."""
    dims = [dim for dim in variable.dims if dim not in ("chain", "draw")]
    values = variable.transpose("chain", "draw", *dims)
    shape = tuple(values.sizes[dim] for dim in dims)
    if len(shape) > 1:
        index = np.unravel_index(np.arange(part.start, part.stop), shape)
        points = {dim: xr.DataArray(i, dims="quantity") for dim, i in zip(dims, index, strict=True)}
        values = values.isel(points).transpose("chain", "draw", "quantity")
    elif shape:
        values = values.isel({dims[0]: part})
    # A compact copy first: turned straight from the draws, every value would be a page of its own.
    block = np.array(values.values, dtype=np.float64, order="C")
    return np.ascontiguousarray(np.moveaxis(block.reshape(*block.shape[:2], -1), 2, 0))


def _sampler_statistics(stats: xr.Dataset) -> dict[str, Any]:
    """BFMI, divergences and tree depths, as far as the sampler recorded them under ArviZ's names."""
    out: dict[str, Any] = {}
    if "energy" in stats:
        out["bfmi"] = bfmi(stats["energy"].transpose("chain", "draw").values)
    if "diverging" in stats:
        out["divergences"] = int(stats["diverging"].sum())
    if "reached_max_tree_depth" in stats:
        out["saturated_trees"] = int(stats["reached_max_tree_depth"].sum())
    if "tree_depth" in stats:
        out["max_tree_depth"] = int(stats["tree_depth"].max())
        out["mean_tree_depth"] = float(stats["tree_depth"].mean())
    return out
