"""What the author of a Workflow says about its runs: their name, parameters and the commit of the code."""

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import (
    CompiledPipeline,
    Manifest,
    contains_tags,
    read_workflow_parameters,
    substitute_tags,
)
from tiphys.protocol.step_spec import CODE_VERSION_ANNOTATION, RUN_PARAMETER, SUBMISSION_PARAMETER
from tiphys.records import make_run_name


def author_parameters(workflow: Manifest) -> dict[str, str]:
    """Values of the workflow parameters that an author declared."""
    tiphys_parameters = (RUN_PARAMETER, SUBMISSION_PARAMETER)
    return {name: value for name, value in read_workflow_parameters(workflow).items() if name not in tiphys_parameters}


def read_code_version(workflow: Manifest) -> str | None:
    """Commit of the code that a Workflow was compiled from; None if not recorded."""
    version: str | None = (workflow["metadata"].get("annotations") or {}).get(CODE_VERSION_ANNOTATION)
    return version


def check_authored_name(pipeline: CompiledPipeline, requested_name: str | None) -> str:
    """The name that the pipeline's ``run_name`` yields; empty without one. The plugin gets the same name from Argo.

    Raises:
        UsageError: a parameter in it has no value, or ``requested_name`` differs from it.
    """
    values = {
        f"workflow.parameters.{name}": value for name, value in read_workflow_parameters(pipeline.manifest).items()
    }
    text = substitute_tags(pipeline.run_name, values.get)
    if contains_tags(text):
        raise UsageError(
            f"pipeline {pipeline.name} names its runs {pipeline.run_name!r}, and a parameter in it has no value; "
            "set the parameter"
        )
    name = make_run_name(text) if text else ""
    if name and requested_name not in (None, name):
        raise UsageError(
            f"pipeline {pipeline.name} names its runs itself, and this one {name!r}, not {requested_name!r}; "
            "leave the name "
            "out, change the parameters that it is made from, or take run_name out of the pipeline"
        )
    return name
