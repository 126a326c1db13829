"""Simulation-based calibration of NUTS: the replicates of calibration.py, sampled by the chains of ``sampler="nuts"``.

    python benchmarks/nuts_calibration.py --replicates 0:400 --jobs 16 --seconds 430 --log nuts_ranks.jsonl
    python benchmarks/calibration.py report nuts_ranks.jsonl --out calibration.json --plot FOLDER

Truths and data are made as for the Gibbs sampler. Chains run as in `gp.sample`, density, whitening, kernel and files
included, but from an unrelated prior draw, so that nothing of its draws comes from the Gibbs sweeps of a usual start.
With one factor the likelihood is the dense one, else the state-space one.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from calibration import VARIANTS, Posed, Record, lane, posed, quantities, run

from msrm.gp.dense import Dense
from msrm.gp.gibbs.chains import light_layout
from msrm.gp.nuts.chains import NutsJob, run_chain
from msrm.gp.nuts.coordinates import Coordinates
from msrm.gp.nuts.settings import NutsSettings
from msrm.gp.nuts.start import begin
from msrm.gp.storage import DrawStore
from msrm.nodes import Backend

KINDS = ("K = 1", "K = 2, null rows", "missing entries", "two runs, run offsets", "learned length scale")
WARMUP, KEPT, THIN = 80, 19, 3


def chain_job(problem: Posed, folder: Path, warmup: int, draws: int) -> NutsJob:
    """The job of one chain that starts at the replicate's own prior draw."""
    sweeper, variant = problem.sweeper, VARIANTS[problem.label]
    specification, layout = sweeper.specification, light_layout(sweeper.layout)
    grid, learned = sweeper.marginal.backend, variant.learned_length_scale
    coordinates = Coordinates.of(specification, layout, problem.start)
    backend: Backend = replace(grid, length_scale_slope=learned)
    if specification.n_factors == 1:
        backend = Dense(layout.groups, 1, specification.matern, learned)
    beginning = begin(coordinates, sweeper, backend, [problem.start], chains=1, seed=problem.replicate)
    beginning = replace(beginning, points=coordinates.point(problem.start)[None])
    folder = DrawStore.create(folder, {}).folder
    settings = NutsSettings()
    return NutsJob(layout, backend, grid, problem.start, beginning, folder, warmup, draws, problem.replicate, settings)


def ranks(
    replicate: int, label: str | None = None, *, warmup: int = WARMUP, kept: int = KEPT, thin: int = THIN
) -> Record:
    """Draw a truth and data, sample the posterior by NUTS, rank the truth."""
    started = time.process_time()
    problem = posed(replicate, KINDS[replicate % len(KINDS)] if label is None else label, 2028)
    with tempfile.TemporaryDirectory() as folder:
        job = chain_job(problem, Path(folder) / "run", warmup, kept * thin)
        run_chain(job, 0)
        draws = DrawStore(job.folder).chain(0).read()
    values = []
    for place in range(thin - 1, kept * thin, thin):
        state = problem.start.from_arrays({name: draws[name][place] for name in problem.start.arrays()})
        current = problem.sweeper.start(state)
        problem.sweeper.draw_latents(problem.rng, current)
        values.append(quantities(current, problem.raw(state, place), float(draws["log_likelihood_marginal"][place])))
    density = job.kernel.density
    packed = density.parts(job.beginning.coordinates.point(problem.at_truth.state)[None])[0][0]
    assert density.host is not None
    likelihood = density.host.likelihood
    at_truth = float(likelihood.value(likelihood.layout.unpacked(np.array(packed))))
    return {
        "what": "nuts ranks",
        **problem.record(values, at_truth, time.process_time() - started),
        "divergences": int(draws["diverging"].sum()),
        "saturated_trees": int(draws["reached_max_tree_depth"].sum()),
        "leapfrogs": float(draws["n_steps"].mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    lane(parser)
    run(ranks, "nuts ranks", parser.parse_args())


if __name__ == "__main__":
    main()
