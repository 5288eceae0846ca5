"""The pipeline in a file that a person names."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hera_pipelines.loading import AnyPipeline

PipelineOption = Annotated[
    str | None, typer.Option("--pipeline", metavar="NAME", help="Which pipeline, where the file defines several.")
]

ExecutorPluginOption = Annotated[
    Path | None,
    typer.Option(
        "--executor-plugin",
        metavar="FILE",
        help="Have the Workflow bring this executor plugin along (YAML of the ConfigMap tiphys-executor-plugin or of "
        "an ExecutorPlugin), for an Argo with ARGO_WORKFLOW_LEVEL_EXECUTOR_PLUGINS=true.",
    ),
]


def load(file: Path, name: str | None) -> "AnyPipeline":
    """Like `hera_pipelines.load_pipeline`; what the file prints goes to stderr, since stdout is for data."""
    from hera_pipelines import load_pipeline  # imports Hera, for which no other command should wait

    with redirect_stdout(sys.stderr):
        return load_pipeline(file, name)
