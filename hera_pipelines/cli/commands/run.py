"""``tiphys run``: a pipeline on this machine, or on a cluster."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tiphys_controller import Started, Submitter, start, start_once
from tiphys_plugin import load_queues

from hera_pipelines.cli.progress.cluster import ClusterJob, follow
from hera_pipelines.cli.progress.local import (
    BEGUN_BEFORE,
    CodeOption,
    EngineOptions,
    Job,
    PortOption,
    QueuesOption,
    SpeedOption,
    StateOption,
    carry_out,
    local_engine,
    remember_code,
)
from hera_pipelines.cli.screen import Screen
from hera_pipelines.cli.shared_options import (
    DEFAULT_STATE,
    ArgoServerOption,
    ContextOption,
    ExecutorPluginOption,
    KubeconfigOption,
    NamespaceOption,
    ParameterOption,
    PipelineOption,
    Where,
    WritingStoreOption,
    is_named,
    load,
    must_be_named,
    parse,
    require_values,
    store_for_writing,
    with_parameters,
)
from hera_pipelines.cli.target import CLUSTER_OPTIONS, ENGINE_OPTIONS, ToClusterOption, cluster_submitter, refuse, words
from hera_pipelines.compile.output import commit_of, record_code_version
from tiphys.errors import NotFoundError, UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.store import Store

if TYPE_CHECKING:
    from hera_pipelines.authoring.loading import AnyPipeline


EXAMPLES = """\b
Examples:
  tiphys run digits.py
  tiphys run digits.py -p lr=0.3 --run digits-hot
  tiphys run digits.py --queues queues.yaml --store s3://ml/tiphys
  tiphys run digits.py --cluster -n ml
  tiphys run digits.py --cluster -n ml --idempotency-key nightly-2026-05-04
  tiphys run digits.py --cluster -n ml --argo-server argo.example.com:443
"""


SERVICE_ACCOUNT = "tiphys-workflow"
"""The chart makes it, with the rights that Argo's pods need."""

_ONLY_CLUSTER = {
    **CLUSTER_OPTIONS,
    "service_account": "--service-account",
    "executor_plugin": "--executor-plugin",
    "detach": "--detach",
}


def run(
    command: typer.Context,
    file: Annotated[Path, typer.Argument(help="Python file that defines a Pipeline.")],
    which: PipelineOption = None,
    parameter: ParameterOption = None,
    name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Name of the run; else one is made.")
    ] = None,
    store: WritingStoreOption = None,
    state: StateOption = DEFAULT_STATE,
    queues: QueuesOption = None,
    plugin_port: PortOption = 0,
    speed: SpeedOption = 1.0,
    code: CodeOption = None,
    cluster: ToClusterOption = False,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    argo_server: ArgoServerOption = None,
    service_account: Annotated[
        str,
        typer.Option(
            "--service-account", metavar="NAME", help="Account of the Workflow's pods, where the pipeline names none."
        ),
    ] = SERVICE_ACCOUNT,
    executor_plugin: ExecutorPluginOption = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit to the cluster and do not watch.")] = False,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key",
            metavar="KEY",
            help="Repeating the command with this key finds the run that it began, and begins no other.",
        ),
    ] = None,
) -> None:
    """Run a pipeline here, with real processes and the same plugin as on a cluster; or, with --cluster, there.

    The name of the run goes to stdout, its progress to stderr. Here Ctrl-C
    stops the run and lets it save; a second one ends it at once. On a cluster
    Ctrl-C only ends the watching.
    """
    screen: Screen = command.obj
    if not cluster:
        refuse(command, _ONLY_CLUSTER, "this is for a cluster; add --cluster")
        options = EngineOptions(state, queues, plugin_port, speed, code or file.parent)
        _here(screen, _Wanted(file, which, parameter or [], name, store, idempotency_key), options)
        return
    refuse(command, ENGINE_OPTIONS, "this is for the local engine, which --cluster does not use; leave it out")
    where = Where(kubeconfig, context, namespace, argo_server)
    choice = _Choice(where, service_account, executor_plugin, detach)
    _on_cluster(screen, _Wanted(file, which, parameter or [], name, store, idempotency_key), choice)


@dataclass(frozen=True)
class _Wanted:
    """What is to run, wherever it does."""

    file: Path
    which: str | None
    parameters: list[str]
    name: str | None
    store: str | None
    key: str | None

    def begin(self, place: Store, submitter: Submitter, manifest: Manifest, namespace: str) -> Started:
        """Start the run, or find it where it was started under the same key before."""
        if self.key is None:
            return start(place, submitter, manifest, self.name, namespace)
        return start_once(place, submitter, manifest, self.key, self.name, namespace)


@dataclass(frozen=True)
class _Choice:
    """Where on a cluster, and how."""

    where: Where
    service_account: str
    executor_plugin: Path | None
    detach: bool


def _here(screen: Screen, wanted: _Wanted, options: EngineOptions) -> None:
    pipeline = load(wanted.file, wanted.which)
    place = store_for_writing(screen, wanted.store, pipeline.store)
    manifest = with_parameters(_compiled(pipeline, place.url, options.queues), parse(wanted.parameters))
    require_values(manifest)
    record_code_version(manifest, commit_of(wanted.file.parent))
    remember_code(manifest, options.code or wanted.file.parent)
    with local_engine(place, options) as (session, watch):
        started = wanted.begin(place, session, manifest, "default")
        screen.write(started.run)
        screen.out.file.flush()
        job = Job(started.run, started.workflow_name, place, options.state, must_be_named(wanted.store, pipeline.store))
        if not started.created:
            screen.note(f"{BEGUN_BEFORE}; see {job.command('get')}, go on with {job.command('resume')}")
            return
        carry_out(screen, session, watch, job)


def _on_cluster(screen: Screen, wanted: _Wanted, choice: _Choice) -> None:
    pipeline = load(wanted.file, wanted.which)
    if not is_named(wanted.store, pipeline.store):
        raise UsageError(
            "no store is named, and a folder of this machine is seen by no pod; give --store s3://…, set TIPHYS_STORE, "
            "or name it in the pipeline"
        )
    place = store_for_writing(screen, wanted.store, pipeline.store)
    compiled = _compiled(pipeline, place.url, None, choice.executor_plugin)
    manifest = with_parameters(compiled, parse(wanted.parameters))
    require_values(manifest)
    record_code_version(manifest, commit_of(wanted.file.parent))
    manifest["spec"].setdefault("serviceAccountName", choice.service_account)
    submitter, at_hand = cluster_submitter(choice.where, screen.note)
    namespace = choice.where.namespace or manifest["metadata"].get("namespace") or at_hand
    if not namespace:
        raise UsageError("nothing names the namespace that the Workflow goes to; give it with -n")
    started = wanted.begin(place, submitter, manifest, namespace)
    screen.write(started.run)
    screen.out.file.flush()
    live = submitter.find(namespace, started.workflow_name)
    if not started.created:
        screen.note(BEGUN_BEFORE)
    if live is None and not started.created:
        return
    if live is None:
        raise NotFoundError(f"Workflow {namespace}/{started.workflow_name} was deleted a moment ago")
    named = must_be_named(wanted.store, pipeline.store)
    job = ClusterJob(
        started.run,
        live,
        place,
        tuple(words([("--store", place.url if named else "")])),
        choice.where.words,
    )
    screen.note(f"Workflow {namespace}/{live.name} in cluster {submitter.cluster}; end it with {job.command('stop')}")
    if not choice.detach:
        follow(screen, submitter, job, manifest)


def _compiled(
    pipeline: "AnyPipeline", store: str, queues: Path | None, executor_plugin: Path | None = None
) -> Manifest:
    from hera_pipelines import CronPipeline  # imports Hera, for which no other command should wait

    known = frozenset(queue.name for queue in load_queues(queues).queues) if queues else None
    if isinstance(pipeline, CronPipeline):
        return pipeline.workflow(store=store, queues=known, executor_plugin=executor_plugin)
    return pipeline.compile(store=store, queues=known, executor_plugin=executor_plugin)
