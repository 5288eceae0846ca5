"""Compiles the Workflow that Hera builds into the Workflow that Argo runs, as one pure function."""

from hera_pipelines.compile.output import TemplateKind, cron_workflow, to_workflow_yaml, workflow_template
from hera_pipelines.compile.settings import CompileOptions, SharedVolume, Spot, StepSettings
from hera_pipelines.compile.workflow import compile_workflow

__all__ = [
    "CompileOptions",
    "SharedVolume",
    "Spot",
    "StepSettings",
    "TemplateKind",
    "compile_workflow",
    "cron_workflow",
    "to_workflow_yaml",
    "workflow_template",
]
