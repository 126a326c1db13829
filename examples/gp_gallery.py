"""The pictures of docs/gallery.md: a GP-MSRM fit of a simulated film, beside the truth that made it.

    python examples/gp_gallery.py [folder]

Bands are plus or minus two standard deviations. Those of latents and predictions hold the parameters at the MAP; those
of response curves are a Laplace approximation: the curvature of the objective in the response parameters, everything
else re-optimized.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import xarray as xr

import msrm
import msrm.simulation
from msrm import plots

RESPONSES = {
    "brain": msrm.Identity(),
    "rating": msrm.Gaussian(
        width=msrm.Free(0.8, bounds=(0.3, 2.0), prior=msrm.LogNormal(-0.4, 0.5)),
        lag=msrm.Free(0.0, bounds=(-1.5, 1.5), prior=msrm.Normal(0.3, 1.0)),
    ),
    "physiology": msrm.Gaussian(
        width=msrm.Free(0.6, bounds=(0.3, 2.0), prior=msrm.LogNormal(-0.4, 0.5)),
        lag=msrm.Free(0.0, bounds=(-1.0, 2.5), prior=msrm.Normal(0.5, 1.0)),
    ),
}
STEPS = {"width": 0.05, "lag": 0.05}  # s, for the curvature by differences
DRAWS = 2000


def main(folder: Path) -> None:
    """Fit, draw, save."""
    folder.mkdir(parents=True, exist_ok=True)
    recording, truth = msrm.simulate(
        features=20, factors=2, runs=3, seconds=90.0, participants=3, gaps=1, gap_seconds=25.0, seed=3
    )
    training, held_out = recording.select(runs=["run-1", "run-2"]), recording.select(runs=["run-3"])
    gp = msrm.GPMSRM(2, RESPONSES, length_scale=3.0).fit(training)
    free = {modality: gp.responses_[modality] for modality, response in RESPONSES.items() if response.free}
    pictures = {
        "latents": latents(gp, held_out, truth),
        "responses": plots.responses(free, bands=response_bands(gp, training), reference=truth.responses),
        "predictions": predictions(gp, held_out),
        "calibration": calibration(gp, held_out),
    }
    for name, axes in pictures.items():
        np.atleast_1d(axes).flat[0].figure.savefig(folder / f"gp_{name}.png", dpi=120)
        print(folder / f"gp_{name}.png")


def latents(gp: msrm.GPMSRM, recording: msrm.Recording, truth: msrm.simulation.Truth) -> np.ndarray:
    """The latent of an unseen run from everybody, and from the ratings of one person alone."""
    times = np.arange(0.0, 90.0, 0.3)
    everybody = gp.infer_latent(recording, times=times)
    one = gp.infer_latent(recording.select(participants=["p3"], modalities=["rating"]), times=times)
    both = xr.DataTree.from_dict({"all streams": everybody["run-3"], "ratings of p3 alone": one["run-3"]})
    true = turned({"run-3": truth.latent["run-3"]}, everybody)["run-3"]
    axes = plots.latents(both, reference=dict.fromkeys(both.children, true))
    # The legend lies where the first panel is empty.
    axes[0, -1].get_legend().remove()
    axes[0, 0].legend(frameon=False, fontsize="small", loc="upper right")
    return axes


def turned(true: dict[str, xr.DataArray], latent: xr.DataTree) -> dict[str, xr.DataArray]:
    """The true latents rotated onto the inferred ones, since the model does not know directions (Procrustes)."""
    found = [latent[run]["mean"].interp(time=path["time"]) for run, path in true.items()]
    kept = [np.isfinite(one.values).all(axis=1) for one in found]
    cross = sum(path.values[k].T @ one.values[k] for path, one, k in zip(true.values(), found, kept, strict=True))
    left, _, right = np.linalg.svd(cross)
    return {run: path.copy(data=path.values @ (left @ right)) for run, path in true.items()}


def response_bands(gp: msrm.GPMSRM, recording: msrm.Recording) -> dict[str, xr.Dataset]:
    """Pointwise bands of the response curves, from draws of N(MAP, inverse curvature) within the bounds."""
    names = [name for name in gp.parameters_ if name.startswith("response/")]
    best = np.array([gp.parameters_[name] for name in names])
    covariance = np.linalg.inv(profile_curvature(gp, recording, names, best))
    for name, value, sd in zip(names, best, np.sqrt(np.diag(covariance)), strict=True):
        print(f"{name:26s} {value:6.3f} +- {sd:.3f} s")
    draws = np.random.default_rng(0).multivariate_normal(best, covariance, DRAWS)
    out = {}
    for modality, response in RESPONSES.items():
        if not response.free:
            continue
        own = {free: draws[:, names.index(f"response/{modality}/{free}")] for free in response.free}
        for free, values in own.items():
            own[free] = np.clip(values, *response.free[free].bounds)
        lag = np.linspace(-6.0, 8.0, 500)
        curves = [response.with_values({k: float(v[i]) for k, v in own.items()}).curve(lag) for i in range(DRAWS)]
        lower, upper = np.quantile(curves, [0.0228, 0.9772], axis=0)
        out[modality] = xr.Dataset({"lower": ("lag", lower), "upper": ("lag", upper)}, {"lag": lag})
    return out


def profile_curvature(gp: msrm.GPMSRM, recording: msrm.Recording, names: list[str], best: np.ndarray) -> np.ndarray:
    """Second derivatives of the objective in the response parameters, all others at their optimum for each value."""
    steps = np.array([STEPS[name.rpartition("/")[2]] for name in names])
    size = len(names)

    def objective(values: np.ndarray) -> float:
        held = {
            modality: response.with_values(
                {free: float(values[names.index(f"response/{modality}/{free}")]) for free in response.free}
            )
            for modality, response in RESPONSES.items()
        }
        refit = msrm.GPMSRM(2, held, length_scale=3.0, n_starts=1, likelihood_tolerance=0.005, progress=False)
        prior = sum(
            float(free.bounded_prior.log_density(values[names.index(f"response/{modality}/{name}")]))
            for modality, response in RESPONSES.items()
            for name, free in response.free.items()
        )
        return refit.fit(recording).objective_ - prior

    centre, unit = objective(best), np.diag(steps)
    ahead, back = ([objective(best + sign * unit[i]) for i in range(size)] for sign in (1.0, -1.0))
    out = np.diag((np.array(ahead) + back - 2.0 * centre) / steps**2)
    for i in range(size):
        for j in range(i):
            both = objective(best + unit[i] + unit[j])
            out[i, j] = out[j, i] = (both - ahead[i] - ahead[j] + centre) / (steps[i] * steps[j])
    return out


def predictions(gp: msrm.GPMSRM, recording: msrm.Recording) -> np.ndarray:
    """Ratings of one participant from another's ratings and physiology, with intervals for measurements."""
    source = recording.select(participants=["p2", "p3"], modalities=["rating", "physiology"])
    times = np.arange(0.0, 90.0, 0.3)
    tree = gp.predict(source, targets={"p3": ["rating"]}, source="across", times=times, noise=True)
    stream = recording.stream("p3", "run-3", "rating")
    return plots.observed_predicted(stream.data, tree["p3/run-3/rating"].to_dataset(), features=["0", "1", "2"])


def calibration(gp: msrm.GPMSRM, recording: msrm.Recording) -> matplotlib.axes.Axes:
    """Share of an unseen run's measurements inside central intervals against what the intervals promise."""
    from matplotlib import pyplot as plt
    from scipy.stats import norm

    levels = np.linspace(0.05, 0.95, 19)
    _, axis = plt.subplots(figsize=(4.2, 3.8), layout="constrained")
    for modality, colour in (("rating", "#0072B2"), ("physiology", "#D55E00")):
        scores = []
        for participant in recording.participants:
            tree = gp.predict(recording, targets={participant: [modality]}, noise=True)
            for run in recording.runs:
                node = tree[f"{participant}/{run}/{modality}"]
                measured = recording.stream(participant, run, modality).values
                scores.append(((measured - node["mean"].values) / np.sqrt(node["variance"].values)).ravel())
        inside = np.abs(np.concatenate(scores))
        covered = [np.mean(inside < norm.ppf(0.5 + level / 2)) for level in levels]
        axis.plot(levels, covered, "o-", ms=4, color=colour, label=modality)
    axis.plot([0, 1], [0, 1], ":", color="black", lw=1.0, label="as promised")
    axis.set(xlabel="nominal interval", ylabel="measurements inside", xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize="small", loc="upper left")
    return axis


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "gallery"))
