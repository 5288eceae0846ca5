"""``tiphys run``: runs a pipeline on this machine or on a cluster."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tiphys_controller import API_VERSION, StartResult, Submitter, start_run, start_run_once
from tiphys_plugin import load_queues

from hera_pipelines.cli.progress.cluster import ClusterSubmission, follow_submission
from hera_pipelines.cli.progress.local import (
    ALREADY_STARTED_MESSAGE,
    CodeOption,
    EngineOptions,
    LocalDetachOption,
    LocalSubmission,
    PortOption,
    QueuesOption,
    SpeedOption,
    StateOption,
    open_local_session,
    record_code_folder,
    run_to_end,
)
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    DEFAULT_STATE,
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
    is_store_named,
    load_pipeline_file,
    parse_parameters,
    require_values,
    store_arguments,
    store_for_writing,
    warn_of_size,
    with_parameters,
)
from hera_pipelines.cli.start.detach import Detachment, detach
from hera_pipelines.cli.target import (
    CLUSTER_OPTIONS,
    ENGINE_OPTIONS,
    OnClusterOption,
    cluster_submitter,
    refuse_options,
)
from hera_pipelines.compile.output import read_git_commit, record_code_version
from tiphys.errors import NotFoundError, UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.store import Store

if TYPE_CHECKING:
    from hera_pipelines.authoring.loading import AnyPipeline


EXAMPLES = """\b
Examples:
  tiphys run digits.py
  tiphys run digits.py -p lr=0.3 --run digits-hot
  tiphys run digits.py --queues queues.yaml --store s3://ml-runs/tiphys
  tiphys run digits.py --run nightly --detach
  tiphys run digits.py --detach -o json | jq -r .workflow_name
  tiphys run digits.py --cluster -n ml
  tiphys run digits.py --cluster -n ml --idempotency-key nightly-2026-05-04
  tiphys run digits.py --cluster -n ml --argo-server argo.example.com:443
"""


_ONLY_CLUSTER = {
    **CLUSTER_OPTIONS,
    "service_account": "--service-account",
    "executor_plugin": "--executor-plugin",
    "preflight": "--no-preflight",
}


def run(
    command: typer.Context,
    file: Annotated[Path, typer.Argument(help="Python file that defines a Pipeline, or YAML with marks of `adopt`.")],
    which: PipelineOption = None,
    parameter: ParameterOption = None,
    name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Name of the run. Default: a generated name.")
    ] = None,
    store: PipelineStoreOption = None,
    state: StateOption = DEFAULT_STATE,
    queues: QueuesOption = None,
    plugin_port: PortOption = 0,
    speed: SpeedOption = 1.0,
    code: CodeOption = None,
    cluster: OnClusterOption = False,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    argo_server: ArgoServerOption = None,
    service_account: ServiceAccountOption = SERVICE_ACCOUNT,
    executor_plugin: ExecutorPluginOption = None,
    preflight: Annotated[
        bool,
        typer.Option(
            "--preflight/--no-preflight",
            help="With --cluster, stop before the submission if `tiphys preflight` finds a problem.",
        ),
    ] = True,
    in_background: LocalDetachOption = False,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key",
            metavar="KEY",
            help="Start the run at most once with this key; a repeated command finds the existing run.",
        ),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Run a pipeline on this machine or on a cluster.

    On this machine the steps are processes in the Python of this command, images
    are not used, and the plugin is the same as on a cluster. With --cluster, the
    Workflow is submitted to Argo, unless `tiphys preflight` finds a problem: then
    nothing is submitted, and the exit code is 1. Prints the name of the run on stdout
    and progress on stderr. On this machine, Ctrl-C stops the run and lets programs
    save; a second Ctrl-C ends them at once. On a cluster, Ctrl-C ends only the
    progress display.
    """
    screen: Screen = command.obj
    if not cluster:
        refuse_options(command, _ONLY_CLUSTER, "this is for a cluster; add --cluster")
        options = EngineOptions(state, queues, plugin_port, speed, code or file.parent)
        request = _RunRequest(file, which, parameter or [], name, store, idempotency_key, output)
        _run_locally(screen, request, options, detach() if in_background else None)
        return
    refuse_options(command, ENGINE_OPTIONS, "this is for the local engine, which --cluster does not use; leave it out")
    cluster_options = ClusterOptions(kubeconfig, context, namespace, argo_server)
    target = _ClusterTarget(cluster_options, service_account, executor_plugin, in_background, preflight)
    _run_on_cluster(screen, _RunRequest(file, which, parameter or [], name, store, idempotency_key, output), target)


@dataclass(frozen=True)
class _RunRequest:
    """The run that the command line describes, for either target; ``output`` is the form of its name."""

    file: Path
    pipeline_name: str | None
    parameters: list[str]
    name: str | None
    store: str | None
    idempotency_key: str | None
    output: Format

    def start(self, store: Store, submitter: Submitter, manifest: Manifest, namespace: str) -> StartResult:
        """Start the run, or return the run that was started under the same idempotency key."""
        if self.idempotency_key is None:
            return start_run(store, submitter, manifest, self.name, namespace)
        return start_run_once(store, submitter, manifest, self.idempotency_key, self.name, namespace)


@dataclass(frozen=True)
class _ClusterTarget:
    """Cluster options of a run."""

    cluster_options: ClusterOptions
    service_account: str
    executor_plugin: Path | None
    detach: bool
    preflight: bool


def _run_locally(screen: Screen, request: _RunRequest, options: EngineOptions, detachment: Detachment | None) -> None:
    pipeline = load_pipeline_file(request.file, request.pipeline_name)
    run_store = store_for_writing(screen, request.store, pipeline.store)
    compiled = _compile_pipeline(pipeline, run_store.url, options.queues)
    manifest = with_parameters(compiled, parse_parameters(request.parameters), pipeline)
    require_values(manifest)
    record_code_version(manifest, read_git_commit(request.file.parent))
    record_code_folder(manifest, options.code or request.file.parent)
    with open_local_session(run_store, options) as (session, observer):
        started = request.start(run_store, session, manifest, "default")
        show_started(screen, started, request.output)
        submission = LocalSubmission(
            started.run,
            started.workflow_name,
            run_store,
            options.state,
            store_arguments(run_store, request.store, pipeline.store),
        )
        if not started.created:
            screen.note(
                f"{ALREADY_STARTED_MESSAGE}; see {submission.command('get')}, "
                f"continue with {submission.command('resume')}"
            )
            return
        run_to_end(screen, session, observer, submission, detachment)


def _run_on_cluster(screen: Screen, request: _RunRequest, target: _ClusterTarget) -> None:
    pipeline = load_pipeline_file(request.file, request.pipeline_name)
    if not is_store_named(request.store, pipeline.store):
        raise UsageError(
            "no store is named, and pods cannot read a folder of this machine; give --store s3://…, name the "
            "store in the pipeline, set TIPHYS_STORE, or use `tiphys config set store`"
        )
    run_store = store_for_writing(screen, request.store, pipeline.store)
    compiled = _compile_pipeline(pipeline, run_store.url, None, target.executor_plugin)
    manifest = with_parameters(compiled, parse_parameters(request.parameters), pipeline)
    require_values(manifest)
    record_code_version(manifest, read_git_commit(request.file.parent))
    manifest["spec"].setdefault("serviceAccountName", target.service_account)
    if not target.preflight:  # which looks at the size, too
        warn_of_size(screen, manifest)
    submitter, default_namespace = cluster_submitter(target.cluster_options, screen.note)
    namespace = target.cluster_options.namespace or manifest["metadata"].get("namespace") or default_namespace
    if not namespace:
        raise UsageError("no namespace is given for the Workflow; give one with -n")
    if target.preflight:
        from hera_pipelines.cli.author.preflight import check_before_submission

        check_before_submission(screen, request.file, manifest, namespace, target.cluster_options)
    started = request.start(run_store, submitter, manifest, namespace)
    show_started(screen, started, request.output)
    live = submitter.find(namespace, started.workflow_name)
    if not started.created:
        screen.note(ALREADY_STARTED_MESSAGE)
    if live is None and not started.created:
        return
    if live is None:
        raise NotFoundError(f"Workflow {namespace}/{started.workflow_name} was deleted just after its creation")
    submission = ClusterSubmission(
        started.run,
        live,
        run_store,
        store_arguments(run_store, request.store, pipeline.store),
        target.cluster_options.command_arguments,
    )
    screen.note(
        f"Workflow {namespace}/{live.name} in cluster {submitter.cluster}; stop it with {submission.command('stop')}"
    )
    if not target.detach:
        follow_submission(screen, submitter, submission, manifest)


_MAX_NAMED = 10


def show_started(screen: Screen, started: StartResult, output: Format, parent: str = "") -> None:
    """Print the name of a new run, and of the ``parent`` of a fork in a document, before it is followed."""
    if started.taken_over:
        names, more = ", ".join(started.taken_over[:_MAX_NAMED]), len(started.taken_over) - _MAX_NAMED
        screen.note(f"taken over: {names}" + (f" and {more} more" if more > 0 else ""))
    if output is Format.TABLE:
        screen.write(started.run)
    else:
        origin = {"parent": parent} if parent else {}
        document = {"apiVersion": API_VERSION, "kind": "StartedRun", **started._asdict(), **origin}
        screen.document(document, output)
    screen.out.file.flush()


def _compile_pipeline(
    pipeline: "AnyPipeline", store: str, queues: Path | None, executor_plugin: Path | None = None
) -> Manifest:
    queue_names = frozenset(queue.name for queue in load_queues(queues).queues) if queues else None
    return compile_to_workflow(pipeline, store=store, queues=queue_names, executor_plugin=executor_plugin)
