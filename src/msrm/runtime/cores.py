"""How many processor cores this process may use (DESIGN 11): affinity and container quota, not the host's count."""

import math
import os
from pathlib import Path, PurePosixPath

__all__ = ["affinity_cores", "available_cores", "cgroup_cores"]


def affinity_cores() -> int:
    """Cores in this process's scheduling affinity, or all the machine's where the system has no affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_cores(root: Path = Path("/")) -> float | None:
    """Core equivalents granted by the processor quota of this process's control groups, versions 1 and 2.

    Parameters
    ----------
    root : Path
        Where the file system with ``proc`` and ``sys`` is mounted.

    Returns
    -------
    float or None
        The smallest quota / period over the group and its ancestors; None without a quota.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = ("", "unified") if not controllers else ("cpu", "cpu,cpuacct", "cpuacct,cpu")
        # A container may see its group under the host's path: ancestors up to the mount are always looked at.
        groups = [PurePosixPath(group), *PurePosixPath(group).parents]
        for mount in mounts:
            for path in groups:
                quotas.append(_quota(root / "sys/fs/cgroup" / mount / str(path).lstrip("/")))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    """Cores granted by one control group's files, None when it sets no limit."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    if quota in ("max", "-1") or float(period) <= 0:
        return None
    return float(quota) / float(period)


def available_cores() -> int:
    """Cores this process may keep busy: the smaller of its affinity and its container's quota (rounded up).

    Examples
    --------
    >>> available_cores() >= 1
    True
    """
    quota = cgroup_cores()
    cores = affinity_cores()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))
