"""``tiphys compile``: prints the Argo Workflow of a pipeline file."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from hera_pipelines.cli.screen import ManifestFormat, Screen
from hera_pipelines.cli.shared_options import (
    SERVICE_ACCOUNT,
    ParameterOption,
    PipelineOption,
    PipelineStoreOption,
    ServiceAccountOption,
    compile_to_workflow,
    load_pipeline_file,
    named_store,
    parse_parameters,
    warn_of_size,
    with_parameters,
)
from hera_pipelines.cli.target import refuse_options
from hera_pipelines.compile import TemplateKind, cron_workflow, to_workflow_yaml, workflow_template
from hera_pipelines.compile.output import read_git_commit, record_code_version
from tiphys.protocol.compiled_workflow import Manifest

EXAMPLES = """\b
Examples:
  tiphys compile digits.py | argo submit -
  tiphys compile digits.py -o json -p lr=0.3 > digits.json
  tiphys compile digits.py --as workflowtemplate | kubectl apply -f -
  tiphys compile digits.py --as cronworkflow --schedule '0 2 * * *' --timezone Europe/Berlin | kubectl apply -f -
"""


_ONLY_NAMED, _ONLY_SCHEDULED = ("name", "service_account"), ("schedule", "timezone")
_TEMPLATE_KINDS = {kind.lower(): kind for kind in TemplateKind}
_WORKFLOW_FIELDS = ("workflowSpec", "workflowMetadata")
"""Fields of a CronWorkflow that describe its Workflows."""


def compile_file(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Python file that defines a Pipeline, or YAML with marks of `adopt`.")],
    pipeline: PipelineOption = None,
    parameter: ParameterOption = None,
    store: PipelineStoreOption = None,
    kind: Annotated[
        Literal["workflow", "workflowtemplate", "clusterworkflowtemplate", "cronworkflow"] | None,
        typer.Option("--as", help="Kind of the document. Default: a CronWorkflow for a CronPipeline, else a Workflow."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Name of the template or schedule. Default: the pipeline's."),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option("--schedule", metavar="CRON", help="Schedule such as '0 2 * * *'; may be repeated."),
    ] = None,
    timezone: Annotated[
        str | None, typer.Option("--timezone", metavar="ZONE", help="Time zone of the schedule. Default: UTC.")
    ] = None,
    service_account: ServiceAccountOption = SERVICE_ACCOUNT,
    output: Annotated[ManifestFormat, typer.Option("-o", "--format", help="Output format.")] = "yaml",
) -> None:
    """Compile a pipeline and print the Workflow.

    Nothing is submitted. --as prints a template or a schedule instead, which hands
    labels and annotations to its Workflows by `workflowMetadata`, so that the
    services know them. A template whose kind was changed by hand does not.
    """
    screen: Screen = context.obj
    loaded = load_pipeline_file(file, pipeline)
    url = named_store(screen, store, loaded.store)
    if kind in (None, "workflow"):
        refuse_options(context, (*_ONLY_NAMED, *_ONLY_SCHEDULED), "it is for a template or schedule; add --as")
    elif kind != "cronworkflow":
        refuse_options(context, _ONLY_SCHEDULED, "it is for a schedule; add --as cronworkflow")
    compiled = loaded.compile(store=url) if kind is None else compile_to_workflow(loaded, store=url)
    if kind not in (None, "workflow"):
        compiled["spec"].setdefault("serviceAccountName", service_account)
    if kind == "cronworkflow":
        given = {"schedules": schedule, "timezone": timezone}
        cron = _schedule_of(loaded.compile(store=url)) | {field: value for field, value in given.items() if value}
        compiled = cron_workflow(compiled, name or loaded.pipeline_name, cron)
    elif kind in _TEMPLATE_KINDS:
        compiled = workflow_template(compiled, name or loaded.pipeline_name, _TEMPLATE_KINDS[kind])
    manifest = with_parameters(compiled, parse_parameters(parameter or []), loaded)
    record_code_version(manifest, read_git_commit(file.parent))
    warn_of_size(screen, manifest)
    screen.write(to_workflow_yaml(manifest) if output == "yaml" else json.dumps(manifest, indent=2))


def _schedule_of(compiled: Manifest) -> Manifest:
    """Fields of a compiled CronWorkflow beside its Workflow; empty for a Workflow."""
    if compiled["kind"] != "CronWorkflow":
        return {}
    return {field: value for field, value in compiled["spec"].items() if field not in _WORKFLOW_FIELDS}
