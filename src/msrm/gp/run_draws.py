"""What `msrm.sample_runs` returns: the draws of every group, opened when asked for, and a table of verdicts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import xarray as xr

from msrm import archive
from msrm.gp.draws import Draws

__all__ = ["RunDraws"]


@dataclass(frozen=True, eq=False)
class RunDraws(Mapping[str, Draws]):
    """The posteriors of all groups: ``result["run-1"]`` opens a group's draws.

    Attributes
    ----------
    table : Dataset
        By ``group``: ``converged``, ``r_hat`` (largest), ``ess`` (smallest, bulk or tail), ``slowest`` (its quantity),
        ``seconds``, ``archive``, ``verdict``; ``problem`` is empty unless the group failed.
    quantities : Dataset
        By ``group`` and ``quantity``: mean, sd, q5, median, q95, ess_bulk, r_hat of everything but single features.
    """

    table: xr.Dataset
    quantities: xr.Dataset

    def __getitem__(self, group: str) -> Draws:
        if group not in self.table["group"]:
            raise KeyError(f"no group {group!r}; there are {', '.join(self.table['group'].values)}")
        row = self.table.sel(group=group)
        if str(row["problem"].item()):
            raise ValueError(f"{group} failed: {row['problem'].item()}")
        return archive.open_fit(str(row["archive"].item()))

    def __iter__(self) -> Iterator[str]:
        return (str(name) for name in self.table["group"].values if name not in self.failed)

    def __len__(self) -> int:
        return self.table.sizes["group"] - len(self.failed)

    @property
    def failed(self) -> dict[str, str]:
        """What went wrong, by group."""
        told = zip(self.table["group"].values, self.table["problem"].values, strict=True)
        return {str(group): str(problem) for group, problem in told if problem}

    def __str__(self) -> str:
        rows, width = self.table, max(len(str(name)) for name in self.table["group"].values)
        lines = [f"{'':{width}}  {'R-hat':>6} {'ESS':>7} {'time':>8}"]
        for i, name in enumerate(rows["group"].values):
            own = {key: rows[key].values[i] for key in rows.data_vars}
            numbers = f"{own['r_hat']:6.3f} {own['ess']:7.0f} {own['seconds']:6.0f} s"
            told = str(own["problem"]) or str(own["verdict"]).splitlines()[0]
            lines.append(f"{name!s:{width}}  {numbers}  {told}")
        return "\n".join(lines)
