"""Arguments and options that several commands share, and the words that some of them choose from."""

from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = [
    "ChainMethod",
    "Config",
    "FitPath",
    "HoldOut",
    "Json",
    "Metric",
    "Modalities",
    "Model",
    "ModelName",
    "Participants",
    "Picture",
    "RecordingPath",
    "Runs",
    "Sampler",
    "Seed",
    "Set",
    "Source",
    "Targets",
    "Task",
]

Source = Literal["within", "across", "both"]
Model = Literal["RMSRM", "GPMSRM"]
HoldOut = Literal["runs", "blocks", "participants"]
Picture = Literal["latents", "responses", "loadings", "convergence", "prediction", "traces", "ranks", "check"]
Sampler = Literal["gibbs", "nuts"]
Metric = Literal["diagonal", "dense"]
ChainMethod = Literal["sequential", "vectorized", "processes"]

RecordingPath = Annotated[
    Path, typer.Argument(metavar="RECORDING", help="A recording (.nc), or a BIDS folder together with --task.")
]
FitPath = Annotated[Path, typer.Argument(metavar="FIT", help="An archive made by `msrm fit` or `msrm sample`.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Settings (TOML): the model's arguments, \\[responses.NAME], \\[recording]."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="NAME=VALUE", help="One setting, its value in TOML; wins over the file. Repeatable."
    ),
]
ModelName = Annotated[Model | None, typer.Option(help="What to fit; RMSRM unless the settings say otherwise.")]
Task = Annotated[str | None, typer.Option(help="BIDS folders: the task to read.")]
Participants = Annotated[list[str] | None, typer.Option("--participant", help="Keep these only. Repeatable.")]
Runs = Annotated[list[str] | None, typer.Option("--run", help="Keep these only. Repeatable.")]
Modalities = Annotated[list[str] | None, typer.Option("--modality", help="Keep these only. Repeatable.")]
Targets = Annotated[
    list[str] | None,
    typer.Option("--target", "-t", metavar="PARTICIPANT/MODALITY", help="A stream to predict. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Seed = Annotated[int | None, typer.Option(help="Seed of everything random.")]
