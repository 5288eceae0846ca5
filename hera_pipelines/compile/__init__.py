"""From the Workflow that Hera builds to the Workflow that Argo runs: one pure function."""

from hera_pipelines.compile.executor_plugins import read_executor_plugin
from hera_pipelines.compile.kinds import cron_workflow, workflow_template
from hera_pipelines.compile.options import CompileOptions
from hera_pipelines.compile.settings import SharedVolume, Spot, StepSettings
from hera_pipelines.compile.text import to_workflow_yaml
from hera_pipelines.compile.workflow import compile_workflow

__all__ = [
    "CompileOptions",
    "SharedVolume",
    "Spot",
    "StepSettings",
    "compile_workflow",
    "cron_workflow",
    "read_executor_plugin",
    "to_workflow_yaml",
    "workflow_template",
]
