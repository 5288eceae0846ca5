"""``tiphys run``: runs a pipeline on this machine or on a cluster."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from tiphys_controller import StartResult, Submitter, start_run
from tiphys_plugin import load_queues

from hera_pipelines.cli.progress.local import ALREADY_STARTED_MESSAGE, record_code_folder
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    SERVICE_ACCOUNT,
    ParameterOption,
    PipelineOption,
    ServiceAccountOption,
    compile_to_workflow,
    is_store_named,
    load_pipeline_file,
    parse_parameters,
    require_values,
    store_arguments,
    store_for_writing,
    warn_of_size,
    with_option_groups,
    with_parameters,
)
from hera_pipelines.cli.start.detach import detach
from hera_pipelines.cli.start.submission import RunNameOption, SubmissionOptions, SubmissionTarget
from hera_pipelines.cli.target import CLUSTER_OPTIONS, ENGINE_OPTIONS, cluster_submitter, refuse_options
from hera_pipelines.compile.output import read_git_commit, record_code_version
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest

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


_ONLY_CLUSTER = (*CLUSTER_OPTIONS, "service_account", "preflight")
_MAX_NAMED = 10


@with_option_groups
def run(
    command: typer.Context,
    file: Annotated[Path, typer.Argument(help="Python file that defines a Pipeline, or YAML with marks of `adopt`.")],
    *,
    which: PipelineOption = None,
    parameter: ParameterOption = None,
    name: RunNameOption = None,
    options: SubmissionOptions,
    service_account: ServiceAccountOption = SERVICE_ACCOUNT,
    preflight: Annotated[
        bool,
        typer.Option(
            "--preflight/--no-preflight",
            help="With --cluster, stop before the submission if `tiphys preflight` finds a problem.",
        ),
    ] = True,
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
    if options.on_cluster:
        refuse_options(
            command, ENGINE_OPTIONS, "this is for the local engine, which --cluster does not use; leave it out"
        )
    else:
        refuse_options(command, _ONLY_CLUSTER, "this is for a cluster; add --cluster")
    # Before the author's file, which may start threads: none survives a fork.
    detachment = detach() if options.in_background and not options.on_cluster else None
    pipeline = load_pipeline_file(file, which)
    if options.on_cluster and not is_store_named(options.store, pipeline.store):
        raise UsageError(
            "no store is named, and pods cannot read a folder of this machine; give --store s3://…, name the "
            "store in the pipeline, or set TIPHYS_STORE"
        )
    store = store_for_writing(screen, options.store, pipeline.store)
    queues = options.engine.queues
    queue_names = frozenset(queue.name for queue in load_queues(queues).queues) if queues else None
    compiled = compile_to_workflow(pipeline, store=store.url, queues=queue_names)
    manifest = with_parameters(compiled, parse_parameters(parameter or []), pipeline)
    require_values(manifest)
    record_code_version(manifest, read_git_commit(file.parent))
    target = SubmissionTarget(screen, options, store, store_arguments(store, options.store, pipeline.store))
    start = partial(_start, target, manifest, name)
    if not options.on_cluster:
        record_code_folder(manifest, options.engine.code or file.parent)
        target.submit_locally(start, file.parent, detachment)
        return
    manifest["spec"].setdefault("serviceAccountName", service_account)
    if not preflight:  # which looks at the size, too
        warn_of_size(screen, manifest)
    submitter, default_namespace = cluster_submitter(options.cluster, screen.note)
    namespace = options.cluster.namespace or manifest["metadata"].get("namespace") or default_namespace
    if not namespace:
        raise UsageError("no namespace is given for the Workflow; give one with -n")
    if preflight:
        from hera_pipelines.cli.author.preflight import check_before_submission

        check_before_submission(screen, file, manifest, namespace, options.cluster)
    target.submit_to_cluster(start, submitter, namespace)


def _start(
    target: SubmissionTarget, manifest: Manifest, name: str | None, submitter: Submitter, namespace: str
) -> tuple[str, int] | None:
    """Start the run, or find the one of the same idempotency key; returns the submission to follow, if any."""
    started = start_run(target.store, submitter, manifest, name, namespace, key=target.options.idempotency_key)
    show_started(target.screen, started, target.options.output)
    submitted = started.run, started.submission
    if started.created:
        return submitted
    if target.options.on_cluster:
        target.screen.note(ALREADY_STARTED_MESSAGE)
        return submitted if submitter.find(namespace, started.workflow_name) else None
    found = target.local_submission(started.run, started.workflow_name)
    target.screen.note(
        f"{ALREADY_STARTED_MESSAGE}; see {found.command('get')}, continue with {found.command('resume')}"
    )
    return None


def show_started(screen: Screen, started: StartResult, output: Format, parent: str = "") -> None:
    """Print the name of a new run, and of the ``parent`` of a fork in a document, before it is followed."""
    if started.taken_over:
        names, more = ", ".join(started.taken_over[:_MAX_NAMED]), len(started.taken_over) - _MAX_NAMED
        screen.note(f"taken over: {names}" + (f" and {more} more" if more > 0 else ""))
    if output is Format.TABLE:
        screen.write(started.run)
    else:
        origin = {"parent": parent} if parent else {}
        screen.typed_document("StartedRun", output, **started._asdict(), **origin)
    screen.out.file.flush()
