"""``tiphys compile``: prints the Argo Workflow of a pipeline file."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hera_pipelines.cli.screen import Screen
from hera_pipelines.cli.shared_options import (
    ExecutorPluginOption,
    ParameterOption,
    PipelineOption,
    load_pipeline_file,
    parse_parameters,
    with_parameters,
)
from hera_pipelines.compile import to_workflow_yaml
from hera_pipelines.compile.output import read_git_commit, record_code_version

EXAMPLES = """\b
Examples:
  tiphys compile digits.py | argo submit -
  tiphys compile digits.py -o json -p lr=0.3 > digits.json
  tiphys compile digits.py --executor-plugin plugin.yaml | argo submit --serviceaccount tiphys-workflow -
"""


class ManifestFormat(StrEnum):
    """Values of ``-o`` for a manifest, which has no table form."""

    YAML = "yaml"
    JSON = "json"


def compile_file(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Python file that defines a Pipeline.")],
    pipeline: PipelineOption = None,
    parameter: ParameterOption = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store", metavar="URL", envvar="TIPHYS_STORE", help="Store of the runs, instead of the pipeline's own."
        ),
    ] = None,
    executor_plugin: ExecutorPluginOption = None,
    output: Annotated[ManifestFormat, typer.Option("-o", "--format", help="Output format.")] = ManifestFormat.YAML,
) -> None:
    """Compile a pipeline and print the Workflow. Nothing is submitted."""
    screen: Screen = context.obj
    compiled = load_pipeline_file(file, pipeline).compile(store=store, executor_plugin=executor_plugin)
    manifest = with_parameters(compiled, parse_parameters(parameter or []))
    record_code_version(manifest, read_git_commit(file.parent))
    screen.write(to_workflow_yaml(manifest) if output == ManifestFormat.YAML else json.dumps(manifest, indent=2))
