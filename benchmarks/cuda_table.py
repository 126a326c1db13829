"""Render the figures of a GPU into docs/cuda.md, between its markers.

python benchmarks/cuda_table.py            # benchmarks/qualification.json and cuda.json into docs/cuda.md
"""

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "cuda.md"
TARGETS = {"1": 5.0, "2": 7.0, "4": 10.0, "32": 60.0}  # milliseconds for a value and gradient, by length


def qualification(report: dict[str, Any]) -> str:
    """Largest difference of each kind of quantity beside its tolerance."""
    worst: dict[tuple[str, float], tuple[float, int]] = {}
    for name, one in report["differences"].items():
        kind = re.sub(r"(,? ?order \d+|K = \d+|\d+ of |, (cpu|gpu)$)", "", name)
        kind = re.sub(r"^(dense|statespace), [^:]*: ", r"\1: ", kind)
        kind = re.sub(r"(mean|second moment) of .*", r"\1 of nodes", re.sub(r"^blocks [^:]*:", "blocks:", kind))
        key = kind.strip(" ,"), 0.0 if "backward" in kind else one["tolerance"]
        largest, count = worst.get(key, (0.0, 0))
        worst[key] = max(largest, one["difference"]), count + 1
    lines = ["| quantity | comparisons | largest difference | tolerance |", "| --- | --- | --- | --- |"]
    for (kind, tolerance), (largest, count) in sorted(worst.items()):
        told = f"{tolerance:.0e}" if tolerance else "1e-14 n"
        told += ", missed" if tolerance and largest > tolerance else ""
        lines.append(f"| {kind} | {count} | {largest:.1e} | {told} |")
    runtime = report["runtime"]
    jax = runtime["jax"] or {}
    kinds = ", ".join(sorted({device["kind"] for device in jax.get("devices", [])}))
    made = (
        f"{kinds}, driver {runtime.get('driver')}, JAX {jax.get('version')}, float64; differences are relative to the "
    )
    return f"{made}largest entry.\n\n" + "\n".join(lines)


def figures(found: dict[str, Any]) -> str:
    """Times and targets, misses named."""
    lines = [
        "| value and gradient | error, nats | ms | target | compiled in, s, target 15 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, one in found.get("likelihood", {}).items():
        if "gradient" not in one:
            continue
        ms, target = one["gradient"]["ms"], TARGETS[name.split(", ")[1].split(" x")[0]]
        told = f"{target:g}" + ("" if ms <= target else ", missed")
        error, compiled = one["error_nats"], one["gradient"]["compile_s"]
        seconds = f"{compiled:.1f}{'' if compiled < 15 else ', missed'}"
        lines.append(
            f"| {name} | {error:.3f}{'' if error < 0.05 else ', above 0.05'} | {ms:.1f} | {told} | {seconds} |"
        )
    lines += ["", "| what | figure | target |", "| --- | --- | --- |"]
    lines += [f"| {what} | {figure} | {target} |" for what, figure, target in _others(found)]
    return "\n".join(lines + _first_calls() + _fits(found))


def _first_calls() -> list[str]:
    """What each entry point costs when a process calls it first (benchmarks/first_calls.py)."""
    path = HERE / "first_calls.json"
    if not path.exists():
        return []
    entries = [one for one in json.loads(path.read_text())["entries"].values() if "first_s" in one]
    lines = [
        "| call, s | first, nothing cached | again in the process | first of a later process |",
        "| --- | --- | --- | --- |",
    ]
    for one in entries:
        figures = (one["first_s"], one["again_s"], one["first_with_filled_cache_s"])
        lines.append(" | ".join([f"| `{one['call']}`", *(f"{figure:.2g}" for figure in figures)]) + " |")
    starts = [start for one in entries for start in one["jax_start_s"]]
    lines.append(f"| JAX's own start, before any of them | {median(starts):.2g} | | {median(starts):.2g} |")
    return ["", *lines]


def _fits(found: dict[str, Any]) -> list[str]:
    """Whole MAPs on the CPU and on the card."""
    lines = [
        "| MAP of 360 features, one start, s | CPU, 4 threads | card | again in the process |",
        "| --- | --- | --- | --- |",
    ]
    for name, one in found.get("fits", {}).items():
        cpu = f"{one['cpu_s']:.1f}" if "cpu_s" in one else "not run"
        lines.append(f"| {name} | {cpu} | {one['cuda_first_s']:.1f} | {one['cuda_again_s']:.1f} |")
    return ["", *lines] if len(lines) > 2 else []


def _others(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    out, dense = _peer(), found.get("dense", {})
    raw, gradient = (
        dense.get(f"{n}, dimension 2730", {}).get("ms") for n in ("raw cholesky and inverse", "value and gradient")
    )
    if raw and gradient:
        target = "2 x raw" + ("" if gradient <= 2 * raw else ", missed")
        out.append(("dense gradient at dimension 2,730", f"{gradient:.1f} ms, raw factorization {raw:.1f} ms", target))
    cache = found.get("cache", {}).get("first gradient of a process", {})
    if "first_gradient_s" in cache:
        first, second = cache["first_gradient_s"], cache["second_start_gradient_s"]
        what = "first gradient of a process, compiled whole as samplers have it"
        out.append((what, f"{first:.1f} s", "15 s" + ("" if first < 15 else ", missed")))
        out.append(("the same with a filled cache", f"{second:.1f} s", "2 s" + ("" if second < 2 else ", missed")))
    out += _gibbs()
    memory = found.get("memory", {}).get("dense by panels", {})
    if "largest_order" in memory:
        out.append(("largest dense order, K times nodes", f"{memory['largest_order']:,}", ""))
    return out


def _peer() -> list[tuple[str, str, str]]:
    """Both packages in turns on the workload's recording, at the MAP (benchmarks/compare.py)."""
    out = []
    for features in (360, 3600):
        path = HERE / f"gradient_cuda_{features}.json"
        if path.exists():
            one = json.loads(path.read_text())
            ours, peer = (1e3 * one["median_seconds"][name] for name in ("msrm", "peer"))
            error = one["runs"]["msrm"][0]["likelihood_error"]
            figure = f"{ours:.1f} ms, the peer {peer:.1f} ms: {one['ratio']:.1f} x; error {error:.3f} nats"
            missed = "" if ours <= 5.0 and error < 0.05 else ", missed"
            what = f"value and gradient at the MAP beside the peer, features {features:,}"
            out.append((what, figure, f"5 ms at 0.05 nats{missed}"))
    return out


def _gibbs() -> list[tuple[str, str, str]]:
    """Effective draws of the compiled sampler (benchmarks/gibbs.py), two cards over one (tests/cuda/two_gpus.py)."""
    out, sampled, two = [], HERE / "gibbs_cuda.json", HERE / "two_gpus.json"
    if sampled.exists():
        one = json.loads(sampled.read_text())
        seconds, least = one["seconds_by_phase"], one["smallest_ess_bulk"]
        figure = (
            f"{least:,.0f} least effective draws and R-hat {one['largest_r_hat']:.3f} over all quantities, "
            f"{one['chains']} chains, {one['warmup']} + {one['draws']:,} sweeps in {seconds['sweeps_of_sample']:.0f} s"
        )
        enough = least >= 1000 and seconds["sweeps_of_sample"] <= 60
        out.append(("Gibbs, features 3600, compiled before", figure, "1,000 in 60 s" + ("" if enough else ", missed")))
        out.append(("... raw features of its draws, on the host", f"{seconds['assembly_of_sample']:.0f} s", ""))
        first = seconds["first draw with compilation"]
        out.append(("... first draw of a process, compilation included", f"{first:.0f} s", ""))
    if two.exists():
        ratio = json.loads(two.read_text())["ratio"]
        out.append(("two cards over one", f"{ratio:.2f} x", "1.9 x" + ("" if ratio >= 1.9 else ", missed")))
    return out


def rendered(page: str, name: str, text: str) -> str:
    """The page with new text between the markers of a name."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def main() -> None:
    page = PAGE.read_text()
    for name, render in (("qualification", qualification), ("cuda", figures)):
        path = HERE / f"{name}.json"
        if path.exists():
            page = rendered(page, name, render(json.loads(path.read_text())))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
