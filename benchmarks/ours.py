"""Time msrm on a recording made by the workload generator, with the settings that the peer is timed with.

    python benchmarks/ours.py r rec.npz          # R-MSRM, to convergence
    python benchmarks/ours.py gradient rec.npz   # warm objective + gradient
    python benchmarks/ours.py map rec.npz        # complete MAP
    python benchmarks/ours.py gradient rec.npz --device cuda --step 0.45    # compiled whole, on a card

Prints one JSON object. Import time is not counted, compilation is.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np

import msrm
from msrm.gp.ascent import Ascent
from msrm.gp.likelihood import Likelihood
from msrm.gp.map import maximize
from msrm.gp.refinement import resolved
from msrm.gp.starts import component_starts

RESPONSES = {
    "brain": msrm.Identity(),
    "rating": msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.5, 1.5), prior=msrm.Normal(0.5, 1.0))),
    "physiology": msrm.Gaussian(
        width=msrm.Free(0.6, bounds=(0.3, 1.5), prior=msrm.LogNormal(float(np.log(0.6)), 0.5)),
        lag=msrm.Free(0.5, bounds=(-1.0, 2.0), prior=msrm.Normal(0.5, 1.0)),
    ),
}
# The peer's R-MSRM has no priors on responses.
R_RESPONSES = {
    "brain": msrm.Identity(),
    "rating": msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.5, 1.5))),
    "physiology": msrm.Gaussian(
        width=msrm.Free(0.6, bounds=(0.3, 1.5)),
        lag=msrm.Free(0.5, bounds=(-1.0, 2.0)),
    ),
}


def load(path: str, shifts: dict[str, float] | None = None) -> msrm.Recording:
    """The recording of an .npz; ``shifts`` moves a participant's brain clock by seconds."""
    data: dict[str, dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]] = {}
    with np.load(path) as archive:
        for key in archive.files:
            if key.startswith("values/"):
                _, participant, run, modality = key.split("/")
                times = archive["times/" + key.removeprefix("values/")]
                if shifts and modality == "brain":
                    times = times + shifts.get(participant, 0.0)
                data.setdefault(participant, {}).setdefault(run, {})[modality] = (archive[key], times)
    return msrm.Recording.from_dict(data)


def fit_r(recording: msrm.Recording, arguments: argparse.Namespace) -> dict[str, object]:
    start = time.perf_counter()
    fit = msrm.RMSRM(n_factors=3, latent_step=0.9, responses=R_RESPONSES, edges="trim", seed=0).fit(recording)
    return {
        "seconds": time.perf_counter() - start,
        "iterations": fit.n_iter_,
        "converged": fit.converged_,
        "objective": fit.objective_,
        "responses": {name: float(v) for name, v in fit.parameters_.items() if name.startswith("response/")},
    }


def gp(**settings: object) -> "msrm.GPMSRM":
    """GP-MSRM in the peer's setting."""
    priors = msrm.Priors(noise=msrm.LogNormal(-0.5, 1.0), loading_sd=1.0, offset_sd=1.0)
    return msrm.GPMSRM(
        n_factors=3, responses=RESPONSES, length_scale=3.0, edges="trim", priors=priors, seed=0, **settings
    )


def time_gradient(recording: msrm.Recording, arguments: argparse.Namespace) -> dict[str, object]:
    """A warm objective and gradient, at the spacing whose error is within the tolerance: at the MAP, or at random."""
    model = gp(likelihood=arguments.likelihood, n_starts=1, device="cpu")
    start = time.perf_counter()
    likelihood, choice = model.prepared(recording, reduce=True)
    prepare = time.perf_counter() - start
    if arguments.random:
        parameters = random_parameters(likelihood)
    else:
        found = maximize(
            likelihood,
            [lambda: list(component_starts(likelihood))],
            tolerance=model.tol,
            likelihood_tolerance=model.likelihood_tolerance,
            max_iter=model.max_iter,
        )
        parameters = found.point.parameters
    if arguments.device == "cuda":
        return {"prepare_seconds": prepare, **compiled_gradient(likelihood, parameters, arguments)}
    backend, error = resolved(
        likelihood.backend,
        lambda one: likelihood.with_backend(one).value(parameters),
        model.likelihood_tolerance,
        extrapolate=True,
    )
    if arguments.step is not None:
        backend = likelihood.backend.at_step(arguments.step)
    ascent = Ascent(likelihood.with_backend(backend))
    x, seconds = ascent.packed(parameters), []
    for _ in range(arguments.repeats + 1):
        start = time.perf_counter()
        point = ascent.point(x + 1e-9 * len(seconds))
        seconds.append(time.perf_counter() - start)
    assert point is not None
    return {
        "at": "random loadings" if arguments.random else "the MAP",
        "prepare_seconds": prepare,
        "first_seconds": seconds[0],
        "warm_seconds": float(np.median(seconds[1:])),
        "objective": point.value,
        "likelihood_error": float(error.error) if arguments.step is None else None,
        "step": backend.step,
        "coarse_step": getattr(backend, "coarse_step", None),
        "backend": choice.name,
    }


def compiled_gradient(
    likelihood: Likelihood, parameters: dict[str, np.ndarray], arguments: argparse.Namespace
) -> dict[str, object]:
    """The likelihood and its gradient compiled whole for JAX's default device, waited for each time."""
    import jax

    from msrm.gp.extrapolation import Extrapolated
    from msrm.gp.jax_backend import NativeLikelihood

    at = likelihood.backend.at_step
    native = NativeLikelihood(likelihood.with_backend(at(arguments.step)), parameters=parameters, room=1.25)
    arrays, seconds, value = native._packed(parameters), [], 0.0
    for _ in range(arguments.repeats + 1):
        start = time.perf_counter()
        (value, _), _ = jax.block_until_ready(native._compiled[1](native.data, arrays))
        seconds.append(time.perf_counter() - start)
    limit = likelihood.with_backend(Extrapolated(at(arguments.step), at(0.5 * arguments.step))).value(parameters)
    return {
        "device": str(jax.devices()[0]),
        "first_seconds": seconds[0],
        "warm_seconds": float(np.median(seconds[1:])),
        "log_likelihood": float(value),
        "likelihood_error": abs(float(value) - limit),
        "step": arguments.step,
    }


def random_parameters(likelihood: Likelihood) -> dict[str, np.ndarray]:
    """Loadings of sd 0.6 in rotated features, as far from the data as the peer's timing."""
    rng = np.random.default_rng(1)
    parameters = {name: np.zeros(shape) for name, shape in likelihood.layout.shapes.items()}
    for name, shape in likelihood.layout.shapes.items():
        if name.startswith("loading/"):
            parameters[name] = rng.normal(0.0, 0.6, shape)
        elif name.startswith("noise/"):
            parameters[name] = np.asarray(0.5)
    return parameters | {
        "response/rating/lag": np.asarray(0.0),
        "response/physiology/width": np.asarray(0.6),
        "response/physiology/lag": np.asarray(0.5),
    }


def dense_objective(recording: msrm.Recording, fit: "msrm.GPMSRM") -> float:
    """The exact objective at a fit's end, by the dense likelihood."""
    exact = gp(likelihood="dense")
    return -(exact.log_likelihood(recording, fit.parameters_) + exact.log_prior(fit.parameters_))


def fit_map(recording: msrm.Recording, arguments: argparse.Namespace) -> dict[str, object]:
    start = time.perf_counter()
    fit = gp(likelihood=arguments.likelihood, n_starts=arguments.n_starts).fit(recording)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "objective": float(fit.objective_),
        "likelihood_error": float(fit.likelihood_error_),
        "iterations": int(fit.n_iter_),
        "converged": bool(fit.converged_),
        "dense_objective": dense_objective(recording, fit) if arguments.dense else None,
        "responses": {name: float(v) for name, v in fit.parameters_.items() if name.startswith("response/")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("r", "gradient", "map"))
    parser.add_argument("recording")
    parser.add_argument("--likelihood", default="auto")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--random", action="store_true", help="gradient at random loadings instead of at the MAP")
    parser.add_argument("--step", type=float, help="gradient at this grid spacing, whatever its error")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the gradient; cuda needs --step")
    parser.add_argument("--n-starts", type=int, default=3)
    parser.add_argument("--dense", action="store_true", help="also the exact objective at the MAP's end")
    parser.add_argument("--four-clocks", action="store_true", help="shift three participants' brain clocks")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and (arguments.what != "gradient" or arguments.step is None):
        parser.error("--device cuda times `gradient` with --step")
    shifts = {"p2": 0.37, "p3": 0.81, "p4": 1.13} if arguments.four_clocks else None
    recording = load(arguments.recording, shifts)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = {"r": fit_r, "gradient": time_gradient, "map": fit_map}[arguments.what](recording, arguments)
    report["peak_above_data_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps({"what": arguments.what, "recording": Path(arguments.recording).name, **report}))


if __name__ == "__main__":
    main()
