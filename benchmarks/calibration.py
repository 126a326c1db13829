"""Simulation-based calibration of the Gibbs sampler, and coverage of predictive intervals on held-out streams.

    python benchmarks/calibration.py ranks --replicates 0:1000 --jobs 12 --seconds 450 --log ranks.jsonl
    python benchmarks/calibration.py coverage --replicates 0:300 --jobs 12 --seconds 300 --log coverage.jsonl
    python benchmarks/calibration.py report ranks.jsonl coverage.jsonl --out calibration.json --plot FOLDER

Ranks among NUTS draws are made by nuts_calibration.py and reported here.

Parameters are drawn from the prior, data from the model given them, then the posterior is sampled: the rank of every
true quantity among its draws must be uniform (Talts et al. 2018). Data come from paths on a grid of 0.02 s and plain
sums over it, which shares no code with the sampler's grid. Replicate r is of variant r modulo their number and depends
on r alone; replicates found in the log are not run again, and `--seconds` starts no more after so long. `coverage`
goes through the public interface: fit, sample, predict a stream that was held out.
"""

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, norm

import msrm
from msrm.gp.data import NodeLayout, PairData, pair_data
from msrm.gp.gibbs.start import state_of
from msrm.gp.gibbs.state import Current, State
from msrm.gp.gibbs.sweep import Sweeper
from msrm.gp.raw_rows import raw_rows
from msrm.gp.statespace import StateSpace
from msrm.nodes import usable_rows
from msrm.runtime import blas_threads

Array = NDArray[np.float64]
Record = dict[str, Any]
FINE = 0.02  # s, of the paths that data are made from
STEP = 0.45  # s, of the sampler's grid
WARMUP, KEPT, THIN = 300, 60, 12
LEVELS = (0.5, 0.8, 0.95)
PRIORS = msrm.Priors(noise=msrm.LogNormal(-1.0, 0.5), loading_sd=1.0, offset_sd=1.0, run_offset_sd=0.7)
LENGTH_SCALE = msrm.LogNormal(0.7, 0.3).bounded(0.8, 6.0)
TIMESCALE = msrm.Free(2.0, bounds=(0.5, 8.0), prior=msrm.LogNormal(0.7, 0.4))


@dataclass(frozen=True)
class Variant:
    """One kind of problem: a stream under Identity, one under a Gaussian response, perhaps one under a Gamma."""

    n_factors: int = 1
    runs: int = 1
    wide: int = 3
    missing: float = 0.0
    gamma: bool = False
    learned_length_scale: bool = False
    ou: bool = False
    run_offsets: bool = False
    participants: int = 1

    @property
    def responses(self) -> dict[str, msrm.responses.Response]:
        """By modality."""
        out: dict[str, msrm.responses.Response] = {
            "brain": msrm.Identity(),
            "rating": msrm.Gaussian(
                width=msrm.Free(0.6, bounds=(0.3, 1.2), prior=msrm.LogNormal(-0.5, 0.3)),
                lag=msrm.Free(0.2, bounds=(-1.0, 1.0), prior=msrm.Normal(0.1, 0.5)),
            ),
        }
        if self.gamma:
            scale = msrm.Free(0.4, bounds=(0.2, 0.8), prior=msrm.LogNormal(-0.9, 0.3))
            out["skin"] = msrm.Gamma(shape=2.5, scale=scale, lag=0.1)
        return out

    @property
    def model(self) -> msrm.GPMSRM:
        """The estimator."""
        scale = msrm.Free(2.0, bounds=(0.8, 6.0), prior=msrm.LogNormal(0.7, 0.3)) if self.learned_length_scale else 2.0
        return msrm.GPMSRM(
            self.n_factors,
            self.responses,
            length_scale=scale,
            priors=PRIORS,
            residual_timescales={"rating": TIMESCALE} if self.ou else None,
            run_offsets=("rating",) if self.run_offsets else (),
            n_starts=1,
            tol=1e-2,
            seed=0,
            progress=False,
        )


VARIANTS = {
    "K = 1": Variant(),
    "K = 2, null rows": Variant(n_factors=2, wide=9),
    "missing entries": Variant(n_factors=2, wide=4, missing=0.25),
    "two runs, run offsets": Variant(runs=2, run_offsets=True),
    "learned length scale": Variant(learned_length_scale=True),
    "OU residuals": Variant(ou=True),
    "Gamma response, K = 2": Variant(n_factors=2, gamma=True),
}
HELD_OUT = Variant(n_factors=2, runs=2, wide=4, participants=2)


@dataclass
class Truth:
    """Parameters as in DESIGN 9, paths (fine time, K) by run on `grid`."""

    parameters: dict[str, Array]
    paths: dict[str, Array]
    grid: Array
    clocks: dict[str, Array] = field(default_factory=dict)


def simulate(variant: Variant, rng: np.random.Generator) -> tuple[msrm.Recording, Truth]:
    """Parameters from the prior, a recording from the model."""
    clocks = {"brain": 1.5 * np.arange(6), "rating": 1.1 * np.arange(8) + 0.2, "skin": 1.3 * np.arange(7) + 0.1}
    truth = Truth({}, {}, np.arange(-14.0, 22.0, FINE), {m: clocks[m] for m in variant.responses})
    parameters = truth.parameters
    for modality, response in variant.responses.items():
        for name, free in response.free.items():
            parameters[f"response/{modality}/{name}"] = np.asarray(drawn(free.bounded_prior, rng))
    if variant.learned_length_scale:
        parameters["length_scale"] = np.asarray(drawn(LENGTH_SCALE, rng))
    if variant.ou:
        parameters["residual_timescale/rating"] = np.asarray(drawn(TIMESCALE.bounded_prior, rng))
    runs = [f"run-{r + 1}" for r in range(variant.runs)]
    scale = float(parameters.get("length_scale", 2.0))
    truth.paths = {run: matern_path(truth.grid, scale, variant.n_factors, rng) for run in runs}
    data: dict[str, dict[str, dict[str, tuple[Array, Array]]]] = {}
    for p in range(variant.participants):
        for modality in variant.responses:
            key = f"p{p + 1}/{modality}"
            features = variant.wide if modality == "brain" else 2
            parameters[f"loading/{key}"] = PRIORS.loading_sd * rng.standard_normal((features, variant.n_factors))
            parameters[f"offset/{key}"] = PRIORS.offset_sd * rng.standard_normal(features)
            parameters[f"noise/{key}"] = np.asarray(drawn(PRIORS.noise, rng))
            for run in runs:
                if variant.run_offsets and modality == "rating":
                    own = PRIORS.run_offset_sd * rng.standard_normal(features)
                    parameters[f"run_offset/p{p + 1}/{run}/{modality}"] = own
                values = observed(variant, truth, p, run, modality, rng)
                data.setdefault(f"p{p + 1}", {}).setdefault(run, {})[modality] = values, clocks[modality]
    return msrm.Recording.from_dict(data), truth


def drawn(prior: Any, rng: np.random.Generator) -> float:
    return float(prior.quantile(rng.uniform()))


def matern_path(grid: Array, length_scale: float, size: int, rng: np.random.Generator) -> Array:
    """Matern-3/2 paths (time, K) of unit variance by their exact recursion over (f, f')."""
    rate, step = np.sqrt(3.0) / length_scale, grid[1] - grid[0]
    decay = np.exp(-rate * step)
    move = decay * np.array([[1 + rate * step, step], [-(rate**2) * step, 1 - rate * step]])
    stationary = np.diag([1.0, rate**2])
    root = np.linalg.cholesky(stationary - move @ stationary @ move.T)
    state = np.sqrt(stationary) @ rng.standard_normal((2, size))
    out = np.empty((len(grid), size))
    for i, noise in enumerate(rng.standard_normal((len(grid), 2, size))):
        out[i] = state[0]
        state = move @ state + root @ noise
    return out


def seen_through(truth: Truth, run: str, modality: str) -> Array:
    """The path filtered by a modality's response at its times, (time, K), by plain sums."""
    grid, path, times = truth.grid, truth.paths[run], truth.clocks[modality]
    values = {name.split("/")[2]: float(v) for name, v in truth.parameters.items() if f"response/{modality}/" in name}
    if modality == "brain":
        u, weights = np.zeros(1), np.ones(1)
    elif modality == "rating":
        u = values["lag"] + np.arange(-6 * values["width"], 6 * values["width"], FINE)
        weights = np.exp(-0.5 * ((u - values["lag"]) / values["width"]) ** 2)
    else:
        s = np.arange(0.5 * FINE, 22.0 * values["scale"], FINE)
        u, weights = 0.1 + s, s**1.5 * np.exp(-s / values["scale"])
    if len(u) > 1:
        weights *= FINE / np.sqrt(FINE * np.sum(weights**2))
    at = times[:, None] - u
    return np.stack([np.interp(at, grid, column) @ weights for column in path.T], axis=1)


def observed(variant: Variant, truth: Truth, p: int, run: str, modality: str, rng: np.random.Generator) -> Array:
    """One stream, (time, feature)."""
    key, times = f"p{p + 1}/{modality}", truth.clocks[modality]
    parameters = truth.parameters
    values = seen_through(truth, run, modality) @ parameters[f"loading/{key}"].T + parameters[f"offset/{key}"]
    values = values + parameters.get(f"run_offset/p{p + 1}/{run}/{modality}", 0.0)
    noise = rng.standard_normal(values.shape)
    tau = parameters.get(f"residual_timescale/{modality}")
    if tau is not None:
        keep = np.exp(-np.diff(times) / tau)
        for i, phi in enumerate(keep):
            noise[i + 1] = phi * noise[i] + np.sqrt(1 - phi**2) * noise[i + 1]
    values = values + np.sqrt(parameters[f"noise/{key}"]) * noise
    if variant.missing:
        gone = rng.uniform(size=values.shape) < variant.missing
        gone[:, 0] = False
        values[gone] = np.nan
    return values


def quantities(current: Current, rows: dict[tuple[str, str], Array], log_likelihood: float) -> dict[str, float]:
    """What is ranked: nothing that a rotation of the factors changes."""
    g = next(iter(current.functionals.values()))["brain"]
    return shared_quantities(
        rows,
        {f"noise/{p}/{m}": v for (p, m), v in current.state.noise.items()},
        {f"response/{m}/{n}": v for m, values in current.state.responses.items() for n, v in values.items()}
        | {"length_scale": current.state.length_scale}
        | {f"residual_timescale/{m}": v for m, v in current.state.timescales.items() if np.isfinite(v)},
        g,
        log_likelihood,
    )


def shared_quantities(
    rows: dict[tuple[str, str], Array],
    noise: dict[str, float],
    scalars: dict[str, float],
    g: Array,
    log_likelihood: float,
) -> dict[str, float]:
    """Quantities of raw rows [w b c...], variances, scalars, and the latents at the Identity clock of the first run."""
    size = g.shape[1]
    out = noise | scalars | {"log_likelihood": log_likelihood}
    for (p, m), block in rows.items():
        gram = block[:, :size] @ block[:, :size].T
        out |= {f"offset/{p}/{m}": block[0, size], f"gram/{p}/{m}/0,0": gram[0, 0], f"gram/{p}/{m}/0,1": gram[0, 1]}
        out[f"gram/{p}/{m}/trace"] = float(np.trace(gram))
        if block.shape[1] > size + 1:
            out[f"run_offset/{p}/{m}"] = block[0, size + 1]
    first = next(iter(rows.values()))
    out |= {"latent/1,1": g[1] @ g[1], "latent/1,3": g[1] @ g[3], "latent/signal": first[0, :size] @ g[2]}
    return {name: float(value) for name, value in out.items()}


def truth_rows(truth: Truth) -> dict[tuple[str, str], Array]:
    """[w b c...] of every pair."""
    rows = {}
    for name, loading in truth.parameters.items():
        if name.startswith("loading/"):
            _, p, m = name.split("/")
            runs = [v for n, v in truth.parameters.items() if n.startswith(f"run_offset/{p}/") and n.endswith(f"/{m}")]
            rows[p, m] = np.column_stack([loading, truth.parameters[f"offset/{p}/{m}"], *runs])
    return rows


@dataclass(frozen=True)
class Posed:
    """A truth with data made from it, and an unrelated state `start` for a chain on them."""

    replicate: int
    label: str
    rng: np.random.Generator
    truth: Truth
    pairs: list[PairData]
    sweeper: Sweeper
    at_truth: Current
    start: State

    def raw(self, state: State, draw: int) -> dict[tuple[str, str], Array]:
        """Rows [w b c...] of raw features of a state."""
        return {
            pair.key: raw_rows(pair, state.rows[pair.key][None], [(self.replicate, draw, i)])[0]
            for i, pair in enumerate(self.pairs)
        }

    def record(self, drawn_values: list[dict[str, float]], log_likelihood: float, cpu_seconds: float) -> Record:
        """Ranks of the truth, with its log likelihood given, among draws."""
        truth, layout = self.truth, self.sweeper.layout
        kinds = ("response/", "length_scale", "residual_timescale/")
        scalars = {n: float(v) for n, v in truth.parameters.items() if n.startswith(kinds)}
        noise = {n: float(v) for n, v in truth.parameters.items() if n.startswith("noise/")}
        true = shared_quantities(
            truth_rows(truth), noise, scalars, seen_through(truth, "run-1", "brain"), log_likelihood
        )
        grid = self.sweeper.marginal.backend
        finer = Sweeper(self.sweeper.specification, layout, grid.at_step(STEP / 2)).start(self.at_truth.state)
        return {
            "replicate": self.replicate,
            "variant": self.label,
            "kept": len(drawn_values),
            "ranks": {n: sum(draw[n] < value for draw in drawn_values) for n, value in true.items()},
            "grid_error": abs(self.at_truth.log_likelihood - finer.log_likelihood),
            "cpu_seconds": cpu_seconds,
        }


def posed(replicate: int, label: str, seed: int) -> Posed:
    """What a replicate is about."""
    variant, rng = VARIANTS[label], np.random.default_rng([seed, replicate])
    recording, truth = simulate(variant, rng)
    specification = variant.model.specification
    usable = usable_rows(recording, specification.responses, edges="extend")
    pairs = [pair for p, m in recording.pairs if (pair := pair_data(recording, usable, p, m, reduce=True))]
    residuals = {m: specification.residual(m) for m in recording.modalities}
    layout = NodeLayout.of(pairs, specification.responses, residuals)
    sweeper = Sweeper(specification, layout, StateSpace(layout.groups, specification.n_factors, STEP))
    at_truth = sweeper.start(state_of(specification, layout, truth.parameters))
    start = state_of(specification, layout, simulate(variant, rng)[1].parameters)
    return Posed(replicate, label, rng, truth, pairs, sweeper, at_truth, start)


def ranks(
    replicate: int, label: str | None = None, *, warmup: int = WARMUP, kept: int = KEPT, thin: int = THIN
) -> Record:
    """Draw a truth and data, sample the posterior from an unrelated start, rank the truth."""
    started = time.process_time()
    problem = posed(replicate, list(VARIANTS)[replicate % len(VARIANTS)] if label is None else label, 2026)
    sweeper, rng = problem.sweeper, problem.rng
    current, drawn_values = sweeper.start(problem.start), []
    windows = {round(share * warmup) for share in (0.15, 0.3, 0.5, 0.9)}
    for sweep in range(warmup + kept * thin):
        finished = sweeper.sweep(rng, current, tune=sweep < warmup)
        current = sweeper.marginal.current(finished.state, finished.design)
        if sweep + 1 in windows:
            sweeper.end_window()
        if sweep >= warmup and (sweep - warmup) % thin == thin - 1:
            drawn_values.append(quantities(finished, problem.raw(finished.state, sweep), current.log_likelihood))
    spent = time.process_time() - started
    return {"what": "ranks"} | problem.record(drawn_values, problem.at_truth.log_likelihood, spent)


def without(recording: msrm.Recording, gone: tuple[str, str, str]) -> msrm.Recording:
    """The recording without one stream of one run."""
    data: dict[str, dict[str, dict[str, tuple[Array, Array]]]] = {}
    for p, run, m in product(recording.participants, recording.runs, recording.modalities):
        if (p, run, m) != gone:
            stream = recording.stream(p, run, m)
            data.setdefault(p, {}).setdefault(run, {})[m] = stream.values, stream.times
    return msrm.Recording.from_dict(data)


def coverage(replicate: int) -> Record:
    """Fit, sample and predict a stream that was held out: how many entries lie inside each interval."""
    rng, start = np.random.default_rng([2027, replicate]), time.process_time()
    recording, _ = simulate(HELD_OUT, rng)
    truth = recording.stream("p2", "run-2", "rating").values
    with warnings.catch_warnings():
        # Tiny data draw warnings about units, rival starts and short chains.
        warnings.simplefilter("ignore")
        training = without(recording, ("p2", "run-2", "rating"))
        fit = HELD_OUT.model.fit(training)
        draws = fit.sample(training, chains=1, warmup=300, draws=400, seed=replicate, progress=False)
        distances = {}
        for name, source in (("draws", draws), ("map", fit)):
            tree = source.predict(recording.select(runs=["run-2"]), targets={"p2": ["rating"]}, noise=True)
            node = tree["p2/run-2/rating"].dataset
            distances[name] = (truth - node["mean"].values) / np.sqrt(node["variance"].values)
    return {
        "what": "coverage",
        "replicate": replicate,
        "inside": {
            name: {str(level): float(np.mean(np.abs(z) < norm.ppf(0.5 + level / 2))) for level in LEVELS}
            for name, z in distances.items()
        },
        "cpu_seconds": time.process_time() - start,
    }


def run(function: Callable[[int], Record], what: str, arguments: argparse.Namespace) -> None:
    """Run replicates in clean processes, one line each as it ends."""
    first, last = (int(part) for part in arguments.replicates.split(":"))
    known = {record["replicate"] for record in logged([arguments.log]) if record["what"] == what}
    waiting, end = iter([r for r in range(first, last) if r not in known]), time.monotonic() + arguments.seconds
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool, arguments.log.open("a") as log:
        pending = {
            pool.submit(on_one_thread, function, r) for _, r in zip(range(arguments.jobs), waiting, strict=False)
        }
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for one in done:
                log.write(json.dumps(one.result()) + "\n")
                log.flush()
                if time.monotonic() < end and (r := next(waiting, None)) is not None:
                    pending.add(pool.submit(on_one_thread, function, r))


def on_one_thread(function: Callable[[int], Record], replicate: int) -> Record:
    with blas_threads(1):
        return function(replicate)


def lane(parser: argparse.ArgumentParser) -> None:
    """Arguments of :func:`run`."""
    parser.add_argument("--replicates", default="0:500", help="first:last, last excluded")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=np.inf, help="start no replicate after so long")
    parser.add_argument("--log", type=Path, required=True)


def logged(paths: list[Path]) -> list[Record]:
    """Records of log files, each replicate once; a line cut short by a kill is skipped."""
    found: dict[tuple[str, int], Record] = {}
    for line in chain.from_iterable(path.read_text().splitlines() for path in paths if path.exists()):
        if line.endswith("}"):
            record = json.loads(line)
            found[record["what"], record["replicate"]] = record
    return list(found.values())


def smallest_tail(ranks_of: NDArray[np.intp], kept: int) -> Array:
    """By row, the smallest two-sided binomial tail of the ECDF over all places (Sailynoja et al. 2022)."""
    count, places = ranks_of.shape[1], np.arange(1, kept + 1) / (kept + 1)
    at = np.array([(ranks_of < place).sum(axis=1) for place in range(1, kept + 1)]).T
    return 2 * np.minimum(binom.cdf(at, count, places), binom.sf(at - 1, count, places)).min(axis=1)


def null_tails(count: int, kept: int, simulations: int = 4000) -> Array:
    """What :func:`smallest_tail` is under uniform ranks."""
    return smallest_tail(np.random.default_rng(0).integers(0, kept + 1, (simulations, count)), kept)


def kind_of(name: str) -> str:
    """What a quantity is pooled with in the plot."""
    parts = name.split("/")
    if parts[0] == "response":
        return f"{parts[2]} of {parts[1]}"
    if parts[0] == "gram":
        return f"W W' {parts[3]}"
    return "latents, " + parts[1] if parts[0] == "latent" else parts[0].replace("_", " ")


def rank_report(records: list[Record]) -> tuple[Record, dict[str, NDArray[np.intp]]]:
    """p values by variant and quantity, and ranks pooled by kind, one quantity a replicate."""
    kept = records[0]["kept"]
    by_quantity: dict[str, list[int]] = {}
    pooled: dict[str, list[int]] = {}
    for record in records:
        kinds: dict[str, list[int]] = {}
        for name, rank in record["ranks"].items():
            by_quantity.setdefault(f"{record['variant']}: {name}", []).append(rank)
            kinds.setdefault(kind_of(name), []).append(rank)
        for kind, own in kinds.items():
            # One of them: quantities of one replicate are not independent.
            pooled.setdefault(kind, []).append(own[record["replicate"] % len(own)])
    nulls: dict[int, Array] = {}

    def p_value(own: list[int]) -> float:
        null = nulls.setdefault(len(own), null_tails(len(own), kept))
        return float(np.mean(null <= smallest_tail(np.array([own]), kept)[0] * (1 + 1e-9)))

    p_values = {name: p_value(own) for name, own in sorted(by_quantity.items())}
    pooled_p = {name: p_value(own) for name, own in sorted(pooled.items())}
    report = {
        "replicates": len(records),
        "by_variant": {v: n for v in VARIANTS if (n := sum(r["variant"] == v for r in records))},
        "draws_ranked_among": kept,
        "quantities": len(p_values),
        "outside_95": float(np.mean([p < 0.05 for p in p_values.values()])),
        "smallest_p": min(p_values.values()),
        "smallest_p_pooled": min(pooled_p.values()),
        "pooled_p": pooled_p,
        "p": p_values,
        "largest_grid_error_nats": max(record["grid_error"] for record in records),
        "median_grid_error_nats": float(np.median([record["grid_error"] for record in records])),
        "cpu_seconds": sum(record["cpu_seconds"] for record in records),
    }
    return report, {name: np.array(own) for name, own in sorted(pooled.items())}


def coverage_report(records: list[Record]) -> Record:
    """Mean coverage with its standard error over replicates."""
    out: Record = {"replicates": len(records)}
    for name in ("draws", "map"):
        for level in map(str, LEVELS):
            inside = np.array([record["inside"][name][level] for record in records])
            error = inside.std(ddof=1) / np.sqrt(len(inside)) if len(inside) > 1 else np.nan
            out[f"{name} {level}"] = [float(inside.mean()), float(error)]
    return out


def plot(pooled: dict[str, NDArray[np.intp]], kept: int, path: Path) -> None:
    """Rank histograms and ECDF differences with simultaneous 95 % bands, one column pair a kind."""
    from matplotlib.figure import Figure

    columns = 4
    rows = -(-len(pooled) // columns)
    figure = Figure(figsize=(12, 3.4 * rows), layout="constrained")
    axes = figure.subplots(2 * rows, columns, squeeze=False)
    for panel in axes.ravel():
        panel.set_axis_off()
    places, n_bins = np.arange(1, kept + 1) / (kept + 1), 10
    for i, (name, own) in enumerate(pooled.items()):
        upper, lower = axes[2 * (i // columns), i % columns], axes[2 * (i // columns) + 1, i % columns]
        level = np.quantile(null_tails(len(own), kept), 0.05)
        low, high = (binom.ppf(q, len(own), places) / len(own) - places for q in (level / 2, 1 - level / 2))
        ecdf = np.array([(own < place).mean() for place in range(1, kept + 1)]) - places
        upper.set_axis_on()
        lower.set_axis_on()
        upper.hist((own + 0.5) / (kept + 1), bins=n_bins, range=(0, 1), color="0.7")
        spread = binom.ppf([0.025, 0.975], len(own), 1 / n_bins)
        upper.axhspan(*spread, color="C0", alpha=0.2, linewidth=0)
        upper.set_title(f"{name} ({len(own)})", fontsize=9)
        lower.fill_between(places, low, high, color="C0", alpha=0.2, linewidth=0)
        lower.plot(places, ecdf, color="C3", linewidth=1)
    figure.savefig(path, dpi=90)


def report(arguments: argparse.Namespace) -> None:
    """Write the figures of log files, and plots of the ranks; sections without a log stay as they are."""
    records, out = logged(arguments.logs), {}
    if arguments.out and arguments.out.exists():
        out = json.loads(arguments.out.read_text())
    for what, section, picture in (("ranks", "ranks", "gibbs"), ("nuts ranks", "nuts_ranks", "nuts")):
        if ranked := [record for record in records if record["what"] == what]:
            out[section], pooled = rank_report(ranked)
            for count in ("divergences", "saturated_trees"):
                if count in ranked[0]:
                    out[section][count] = sum(record[count] for record in ranked)
            if arguments.plot:
                plot(pooled, ranked[0]["kept"], arguments.plot / f"{picture}_calibration.png")
    if covered := [record for record in records if record["what"] == "coverage"]:
        out["coverage"] = coverage_report(covered)
    text = json.dumps(out, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("ranks", "coverage"):
        lane(commands.add_parser(name))
    one = commands.add_parser("report")
    one.add_argument("logs", type=Path, nargs="+")
    one.add_argument("--out", type=Path)
    one.add_argument("--plot", type=Path, help="folder")
    arguments = parser.parse_args()
    if arguments.command == "report":
        report(arguments)
    else:
        run({"ranks": ranks, "coverage": coverage}[arguments.command], arguments.command, arguments)


if __name__ == "__main__":
    main()
