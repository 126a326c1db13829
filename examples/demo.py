"""What `make demo` runs: a recording with a known truth, R-MSRM, what it found, and whether it predicts.

Four people watch a film in three runs. Three are scanned (60 parcels), all rate five feelings and wear two
physiological sensors. R-MSRM learns from two runs; the third says whether what it learned predicts.
"""

import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import xarray as xr

import msrm
from msrm import plots
from msrm.cli.report import score_lines

OUT = Path("demo_output")
RESPONSES = {
    "brain": msrm.Identity(),
    "rating": msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.5, 1.5))),
    "physiology": msrm.Gaussian(width=0.8, lag=msrm.Free(0.0, bounds=(-2.5, 2.5))),
}


def main() -> None:
    """Simulate, fit, report, draw and archive."""
    OUT.mkdir(exist_ok=True)
    recording, truth = msrm.simulate(features=60, runs=3, seconds=240.0, participants=4, seed=7)
    recording.to_netcdf(OUT / "recording.nc")
    print(recording, "\n")

    training, held_out = recording.select(runs=["run-1", "run-2"]), recording.select(runs=["run-3"])
    start = time.perf_counter()
    fit = msrm.RMSRM(n_factors=3, latent_step=0.9, responses=RESPONSES).fit(training)
    state = "converged" if fit.converged_ else "did not converge"
    print(f"R-MSRM on two runs: {state} after {fit.n_iter_} iterations, {time.perf_counter() - start:.2f} s, ", end="")
    print(f"objective {fit.objective_:.5f}")

    print("\nresponses           found  truth")
    for modality, response in fit.responses_.items():
        for name in RESPONSES[modality].free:
            found, true = response.start[name], truth.responses[modality].start[name]
            print(f"  {modality} {name}".ljust(18) + f"{found:5.2f} s {true:5.2f} s")

    latent = fit.infer_latent(held_out)
    print(
        f"\nlatent of the unseen run: R2 {recovered(latent['run-3'].to_dataset(), truth.latent['run-3']):.3f} ", end=""
    )
    print("with the true one (a rotation is free)")

    scores = msrm.score(fit, held_out, training=training, n_shifts=0)
    print("\neach stream of the unseen run predicted from its other streams:")
    print("\n".join(score_lines(scores)))

    predicted = fit.predict(held_out, targets={"p1": ["rating"]})
    stream = held_out.stream("p1", "run-3", "rating")
    pictures = {
        "responses": plots.responses(fit, reference=truth.responses),
        "latent": plots.latents(latent),
        "rating": plots.observed_predicted(stream.data, predicted["p1/run-3/rating"].to_dataset()),
    }
    for name, axes in pictures.items():
        axes.flat[0].figure.savefig(OUT / f"{name}.png", dpi=150)
    fit.save(OUT / "fit.nc")
    again = msrm.open_fit(OUT / "fit.nc").predict(held_out, targets={"p1": ["rating"]})
    assert again["p1/run-3/rating/mean"].identical(predicted["p1/run-3/rating/mean"])
    print(f"\nsaved in {OUT}/: fit.nc (opened again, it predicts identically), recording.nc, ", end="")
    print(", ".join(f"{name}.png" for name in pictures))


def recovered(latent: xr.Dataset, true: xr.DataArray) -> float:
    """R2 of the true latent regressed on the inferred one at supported times."""
    found = latent["mean"].where(latent["supported"], drop=True).interp(time=true["time"]).values
    seen = np.isfinite(found).all(axis=1)
    design = np.c_[found[seen], np.ones(seen.sum())]
    residual = true.values[seen] - design @ np.linalg.lstsq(design, true.values[seen])[0]
    return 1.0 - residual.var() / true.values[seen].var()


if __name__ == "__main__":
    main()
