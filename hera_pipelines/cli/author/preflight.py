"""``tiphys preflight``: says what would go wrong with a pipeline, before it is submitted."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tiphys_controller.doctor import CheckStatus, Finding, UnknownValue, failed_checks
from tiphys_plugin import load_queues

from hera_pipelines.cli.author.preflight_observation import observe_for_preflight
from hera_pipelines.cli.cluster.findings import SourceLine, format_place, show_findings
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    SERVICE_ACCOUNT,
    ClusterOptions,
    FormatOption,
    ParameterOption,
    PipelineOption,
    PipelineStoreOption,
    ServiceAccountOption,
    compile_to_workflow,
    load_pipeline_file,
    named_store,
    parse_parameters,
    with_option_groups,
    with_parameters,
)
from hera_pipelines.preflight import PreflightObservation, PreflightSubject, build_subject, run_preflight_checks
from tiphys.errors import TiphysError, UsageError
from tiphys.protocol.compiled_workflow import Manifest

if TYPE_CHECKING:
    from hera_pipelines.authoring.loading import AnyPipeline
    from tiphys.kube import KubeApi

EXAMPLES = """\b
Examples:
  tiphys preflight digits.py -n ml
  tiphys preflight digits.py -p image=ghcr.io/acme/digits:1.4 -n ml
  tiphys preflight digits.py --queues queues.yaml
  tiphys preflight adopted.yaml -o json | jq '.findings[] | select(.state == "failed")'
"""
LIMIT_SECONDS = 30.0


@with_option_groups
def preflight(
    command: typer.Context,
    file: Annotated[Path, typer.Argument(help="Python file that defines a Pipeline, or YAML with marks of `adopt`.")],
    *,
    which: PipelineOption = None,
    parameter: ParameterOption = None,
    store: PipelineStoreOption = None,
    queues: Annotated[
        Path | None,
        typer.Option("--queues", metavar="FILE", help="Queue file to check against, instead of the cluster's queues."),
    ] = None,
    cluster: ClusterOptions,
    service_account: ServiceAccountOption = SERVICE_ACCOUNT,
    limit: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, max=600, help="Time limit for cluster and store.")
    ] = LIMIT_SECONDS,
    output: FormatOption = Format.TABLE,
) -> None:
    """Find out what would go wrong with a pipeline, before it is submitted.

    Looks at store, cluster, rights, GPU queues, claims, Secrets, grace periods,
    retries, images and size. Nothing is submitted, nothing in the cluster is
    changed, and no content of a Secret is read. Without a kubeconfig, the checks
    that need no cluster are made. Exit code 1 if something will go wrong; warnings
    and what could not be checked do not count.
    """
    screen: Screen = command.obj
    loaded = load_pipeline_file(file, which)
    url = named_store(screen, store, loaded.store)
    manifest = with_parameters(compile_to_workflow(loaded, store=url), parse_parameters(parameter or []), loaded)
    rules = load_queues(queues) if queues else None
    api, unasked = _connect(cluster, command)
    place = cluster.namespace or (manifest.get("metadata") or {}).get("namespace") or (api.namespace if api else "")
    subject = build_subject(file, manifest, service_account, place, _find_schedule_complaint(loaded, url))
    observed = observe_for_preflight(subject, api, unasked, rules, limit, tries_used_store=True)
    findings = run_preflight_checks(subject, _leave_submission_to(cluster.argo_server, observed))
    show_findings(screen, findings, output, {"pipeline": subject.pipeline.name}, _source_lines(subject))
    _require_ready(findings)


def check_before_submission(
    screen: Screen, file: Path, manifest: Manifest, namespace: str, options: ClusterOptions
) -> None:
    """Print the warnings and problems of a Workflow that is about to be submitted; nothing if there are none.

    Raises:
        TiphysError: something will go wrong.
    """
    api, unasked = _connect(options)
    try:
        subject = build_subject(file, manifest, SERVICE_ACCOUNT, namespace)
        observed = observe_for_preflight(subject, api, unasked, None, LIMIT_SECONDS, tries_used_store=False)
        observed = _leave_submission_to(options.argo_server, observed)
    finally:
        if api is not None:
            api.close()
    findings = run_preflight_checks(subject, observed)
    for finding in findings:
        if finding.state is CheckStatus.WARNING:
            screen.note(f"preflight warning: {_format_line(subject, finding)}")
    for finding in findings:
        if finding.state is CheckStatus.FAILED:
            screen.error(f"preflight problem: {_format_line(subject, finding)}")
    if unchecked := sum(finding.state is CheckStatus.UNKNOWN for finding in findings):
        screen.note(f"preflight: {unchecked} checks could not be made; `tiphys preflight {file}` lists them")
    _require_ready(findings, "; add --no-preflight to submit all the same")


def _connect(options: ClusterOptions, command: typer.Context | None = None) -> "tuple[KubeApi | None, str]":
    """The API server, or why there is none to ask; without ``command``, also where the options name one."""
    try:
        return options.connect(command), ""
    except TiphysError as error:
        if command is not None and (options.kubeconfig or options.context):
            raise
        return None, f"there is no cluster to ask: {error}"


def _leave_submission_to(argo_server: str | None, observed: PreflightObservation) -> PreflightObservation:
    """An argo-server may create Workflows for callers who may not; only it knows."""
    if not argo_server:
        return observed
    return replace(observed, may_submit=UnknownValue(f"argo-server {argo_server} decides who may create Workflows"))


def _find_schedule_complaint(pipeline: "AnyPipeline", store: str | None) -> str:
    """Why the schedule or template of the pipeline cannot be compiled, though its Workflow can."""
    from hera_pipelines import Pipeline

    if isinstance(pipeline, Pipeline):
        return ""
    try:
        pipeline.compile(store=store)
    except UsageError as error:
        return str(error)
    return ""


def _require_ready(findings: Iterable[Finding], hint: str = "") -> None:
    if failed := failed_checks(findings):
        raise TiphysError(
            f"preflight found what will go wrong: {', '.join(failed)} failed; each finding says what to do{hint}"
        )


def _source_lines(subject: PreflightSubject) -> Callable[[Finding], SourceLine]:
    """Where the step of a finding is written."""
    return lambda finding: (str(subject.file), subject.line_of(finding.place) if finding.place else None)


def _format_line(subject: PreflightSubject, finding: Finding) -> str:
    place = f"{format_place(finding, _source_lines(subject))}: " if finding.place else ""
    remedy = f" → {finding.remedy}" if finding.remedy else ""
    return f"{finding.check}: {place}{finding.sentence}{remedy}"
