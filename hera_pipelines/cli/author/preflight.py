"""``tiphys preflight``: says what would go wrong with a pipeline, before it is submitted."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tiphys_controller import API_VERSION
from tiphys_controller.doctor.observed import UnknownValue
from tiphys_plugin import load_queues

from hera_pipelines.cli.author.preflight_observation import observe_for_preflight
from hera_pipelines.cli.cluster.doctor import STATE_TEXTS
from hera_pipelines.cli.error_messages import PreflightFailedError
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    SERVICE_ACCOUNT,
    ArgoServerOption,
    ClusterOptions,
    ContextOption,
    ExecutorPluginOption,
    FormatOption,
    KubeconfigOption,
    NamespaceOption,
    ParameterOption,
    PipelineOption,
    PipelineStoreOption,
    ServiceAccountOption,
    compile_to_workflow,
    load_pipeline_file,
    named_store,
    parse_parameters,
    with_parameters,
)
from hera_pipelines.preflight import (
    PreflightFinding,
    PreflightObservation,
    PreflightSubject,
    build_subject,
    is_ready,
    run_preflight_checks,
)
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


def preflight(
    command: typer.Context,
    file: Annotated[Path, typer.Argument(help="Python file that defines a Pipeline, or YAML with marks of `adopt`.")],
    which: PipelineOption = None,
    parameter: ParameterOption = None,
    store: PipelineStoreOption = None,
    queues: Annotated[
        Path | None,
        typer.Option("--queues", metavar="FILE", help="Queue file to check against, instead of the cluster's queues."),
    ] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    argo_server: ArgoServerOption = None,
    service_account: ServiceAccountOption = SERVICE_ACCOUNT,
    executor_plugin: ExecutorPluginOption = None,
    limit: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, max=600, help="Time limit for cluster and store.")
    ] = LIMIT_SECONDS,
    output: FormatOption = Format.TABLE,
) -> None:
    """Find out what would go wrong with a pipeline, before it is submitted.

    Looks at store, cluster, rights, GPU queues, claims, Secrets, grace periods,
    retries, images, data and size. Nothing is submitted, nothing in the cluster is
    changed, and no content of a Secret is read. Without a kubeconfig, the checks
    that need no cluster are made. Exit code 1 if something will go wrong; warnings
    and what could not be checked do not count.
    """
    screen: Screen = command.obj
    loaded = load_pipeline_file(file, which)
    url = named_store(screen, store, loaded.store)
    options = {"store": url, "executor_plugin": executor_plugin}
    manifest = with_parameters(compile_to_workflow(loaded, **options), parse_parameters(parameter or []), loaded)
    rules = load_queues(queues) if queues else None
    api, unasked = _connect(ClusterOptions(kubeconfig, context, namespace))
    if api is not None:
        command.call_on_close(api.close)
    place = namespace or (manifest.get("metadata") or {}).get("namespace") or (api.namespace if api else "")
    subject = build_subject(file, manifest, service_account, place, _find_schedule_complaint(loaded, options))
    observed = observe_for_preflight(subject, api, unasked, rules, limit, tries_used_store=True)
    findings = run_preflight_checks(subject, _leave_submission_to(argo_server, observed))
    _show(screen, subject, findings, output)
    _require_ready(findings)


def check_before_submission(
    screen: Screen, file: Path, manifest: Manifest, namespace: str, options: ClusterOptions
) -> None:
    """Print the warnings and problems of a Workflow that is about to be submitted; nothing if there are none.

    Raises:
        PreflightFailedError: something will go wrong.
    """
    api, unasked = _connect(options, is_optional=True)
    try:
        subject = build_subject(file, manifest, SERVICE_ACCOUNT, namespace)
        observed = observe_for_preflight(subject, api, unasked, None, LIMIT_SECONDS, tries_used_store=False)
        observed = _leave_submission_to(options.argo_server, observed)
    finally:
        if api is not None:
            api.close()
    findings = run_preflight_checks(subject, observed)
    for one in findings:
        if one.state == "warning":
            screen.note(f"preflight warning: {_format_line(subject, one)}")
    for one in findings:
        if one.state == "failed":
            screen.error(f"preflight problem: {_format_line(subject, one)}")
    if unchecked := sum(one.state == "unknown" for one in findings):
        screen.note(f"preflight: {unchecked} checks could not be made; `tiphys preflight {file}` lists them")
    _require_ready(findings, "; add --no-preflight to submit all the same")


def _connect(options: ClusterOptions, *, is_optional: bool = False) -> "tuple[KubeApi | None, str]":
    """The API server, or why there is none to ask."""
    try:
        return options.connect(), ""
    except TiphysError as error:
        if not is_optional and (options.kubeconfig or options.context):
            raise
        return None, f"there is no cluster to ask: {error}"


def _leave_submission_to(argo_server: str | None, observed: PreflightObservation) -> PreflightObservation:
    """An argo-server may create Workflows for callers who may not; only it knows."""
    if not argo_server:
        return observed
    return replace(observed, may_submit=UnknownValue(f"argo-server {argo_server} decides who may create Workflows"))


def _find_schedule_complaint(pipeline: "AnyPipeline", options: dict[str, Any]) -> str:
    """Why the schedule or template of the pipeline cannot be compiled, though its Workflow can."""
    from hera_pipelines import Pipeline

    if isinstance(pipeline, Pipeline):
        return ""
    try:
        pipeline.compile(**options)
    except UsageError as error:
        return str(error)
    return ""


def _require_ready(findings: Iterable[PreflightFinding], hint: str = "") -> None:
    if not is_ready(findings := list(findings)):
        failed = [one.check for one in findings if one.state == "failed"]
        raise PreflightFailedError(
            f"preflight found what will go wrong: {', '.join(dict.fromkeys(failed))} failed; each finding says what "
            f"to do{hint}"
        )


def _show(screen: Screen, subject: PreflightSubject, findings: Sequence[PreflightFinding], output: Format) -> None:
    if output is Format.TABLE:
        rows = [
            (
                STATE_TEXTS[one.state.value],
                one.check,
                _format_place(subject, one),
                f"{one.sentence}\n→ {one.remedy}" if one.remedy else one.sentence,
            )
            for one in findings
        ]
        screen.table(("RESULT", "CHECK", "WHERE", "FINDING"), rows, wraps=True)
        return
    listed = [
        {
            **one._asdict(),
            "state": one.state.value,
            "file": str(subject.file),
            "line": subject.line_of(one.step) if one.step else None,
        }
        for one in findings
    ]
    document = {"apiVersion": API_VERSION, "kind": "PreflightFindings", "pipeline": subject.pipeline.name}
    screen.document({**document, "ready": is_ready(findings), "findings": listed}, output)


def _format_place(subject: PreflightSubject, one: PreflightFinding) -> str:
    if not one.step:
        return "-"
    line = subject.line_of(one.step)
    return one.step if line is None else f"{one.step} ({subject.file.name}:{line})"


def _format_line(subject: PreflightSubject, one: PreflightFinding) -> str:
    place = f"{_format_place(subject, one)}: " if one.step else ""
    remedy = f" → {one.remedy}" if one.remedy else ""
    return f"{one.check}: {place}{one.sentence}{remedy}"
