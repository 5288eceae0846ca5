"""``tiphys import-kfp``: translates a compiled pipeline of Kubeflow into a Workflow whose steps are marked."""

from pathlib import Path
from typing import Annotated

import typer

from hera_pipelines.cli.screen import Screen

EXAMPLES = """\b
Examples:
  tiphys import-kfp pipeline.yaml --output workflow.yaml
  tiphys run workflow.yaml -p rows=100
  tiphys compile workflow.yaml --store s3://ml-runs/tiphys | argo submit -
"""


def import_kfp(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="YAML that the SDK of Kubeflow Pipelines, version 2, has compiled.")],
    target: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the Workflow to this file instead of stdout.")
    ] = None,
) -> None:
    """Translate a pipeline of Kubeflow into a Workflow with marked steps.

    Python and container components become steps, those with accelerators trainings.
    What has no counterpart is refused by name. The file that is written is a Workflow
    of your own from then on: compile, run, plan, resume and fork take it.
    """
    from hera_pipelines.authoring.adoption.kubeflow import read_kubeflow_pipeline  # imports Hera: half a second
    from hera_pipelines.compile import to_workflow_yaml

    screen: Screen = context.obj
    workflow = read_kubeflow_pipeline(file)
    count = len(workflow["spec"]["templates"]) - 1
    hint = f" with {count} step{'' if count == 1 else 's'}; run it with `tiphys run {target}`"
    screen.save(target, to_workflow_yaml(workflow), "Workflow", hint)
