"""Run the released peer's NUTS on the recording of benchmarks/nuts.py, with the peer's own interpreter, until a limit.

    python benchmarks/peer_nuts.py rec.npz --peer peer/bin/python --seconds 600 --out benchmarks/peer_nuts.json

The peer is a black box: its public estimator at its own tree depth and metric, K = 2, and fewer chains and draws than
it takes by itself, so that it may end in time. What it tells of its phases, and when, is kept.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def run_the_peer(recording: str, chains: int, warmup: int, draws: int) -> None:
    """In the peer's interpreter: fit the posterior, print events and the result's attributes as JSON lines."""
    import numpy as np
    from multimodalsrm import Gaussian, Identity, Response, TimeSeries
    from multimodalsrm.bayesian import BayesianMultimodalSRM, BayesianPriors, Prior, SamplerConfig

    archive, data = np.load(recording), {}
    for key in archive.files:
        if key.startswith("values/"):
            _, participant, run, modality = key.split("/")
            values = archive[key]
            mask = np.isfinite(values)
            series = TimeSeries(np.where(mask, values, 0.0), archive["times/" + key[7:]], mask)
            data.setdefault(participant, {}).setdefault(run, {})[modality] = series
    first = sorted(data)[0]
    responses = {
        "brain": Response(Identity(), estimate=False, pooling="shared"),
        "rating": Response(
            Gaussian(width=0.6, lag=0.0), fixed={"width": 0.6}, bounds={"lag": (-1.5, 1.5)}, pooling="shared"
        ),
        "physiology": Response(
            Gaussian(width=0.6, lag=0.5), bounds={"width": (0.3, 1.5), "lag": (-1.0, 2.0)}, pooling="shared"
        ),
    }
    filters = {
        "rating": {"lag": Prior.normal(0.5, 1.0)},
        "physiology": {"width": Prior.lognormal(np.log(0.6), 0.5), "lag": Prior.normal(0.5, 1.0)},
    }
    priors = BayesianPriors(noise=Prior.lognormal(-0.5, 1.0), loading_sd=1.0, offset_sd=1.0, filters=filters)
    model = BayesianMultimodalSRM(
        features=2,
        responses=responses,
        priors=priors,
        length_scale=3.0,
        inference="posterior",
        linear_algebra="grouped",
        sampler=SamplerConfig(chains=chains, warmup=warmup, draws=draws),
        anchor=(first, "brain", 0),
        factor_anchors=((first, "brain", 0), (first, "brain", 1)),
        max_observations=10**9,
        random_state=0,
    )
    begun = time.perf_counter()

    def told(event: dict[str, object]) -> None:
        at = round(time.perf_counter() - begun, 2)
        print(json.dumps({"at_s": at, "event": f"{event.get('phase')} {event.get('status')}"}), flush=True)

    model.fit(data, progress=told)
    found = {name: repr(value)[:2000] for name, value in vars(model).items() if "diagnos" in name}
    print(json.dumps({"at_s": time.perf_counter() - begun, "event": "ended", "diagnostics": found}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recording")
    parser.add_argument("--peer", required=True, help="the peer's interpreter")
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        run_the_peer(arguments.recording, arguments.chains, arguments.warmup, arguments.draws)
        return
    counts = [f"--{name}={getattr(arguments, name)}" for name in ("chains", "warmup", "draws")]
    command = [arguments.peer, __file__, arguments.recording, "--peer", arguments.peer, "--inside", *counts]
    environment = os.environ | {"JAX_ENABLE_X64": "true", "JAX_PLATFORMS": "cpu"}
    stopped = False
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=arguments.seconds)
        output = done.stdout
        if done.returncode:
            raise SystemExit(f"the peer ended with {done.returncode}")
    except subprocess.TimeoutExpired as late:
        stopped, output = True, (late.stdout or b"").decode()
    events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    report = {name: getattr(arguments, name) for name in ("chains", "warmup", "draws", "seconds")}
    text = json.dumps(report | {"stopped": stopped, "events": events}, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
