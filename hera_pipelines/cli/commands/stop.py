"""``tiphys stop``: end a run on a cluster; what is finished stays, and programs may save."""

from typing import Annotated

import typer
from tiphys_controller import LiveWorkflow, Shutdown, is_known

from hera_pipelines.cli.screen import Screen
from hera_pipelines.cli.shared_options import (
    ArgoServerOption,
    ContextOption,
    KubeconfigOption,
    StoreOption,
    Where,
    existing_store,
    must_be_named,
)
from hera_pipelines.cli.target import (
    cluster_submitter,
    is_on_cluster,
    last_submission,
    must_be_the_cluster_of,
    ran_on,
    words,
)
from tiphys.errors import NotFoundError, UsageError
from tiphys.store import Submission, read_run

EXAMPLES = """\b
Examples:
  tiphys stop digits-7xk2p
  tiphys stop digits-7xk2p --terminate
"""


def stop(
    command: typer.Context,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    terminate: Annotated[
        bool, typer.Option("--terminate", help="At once: the exit handler does not run, and nobody seals the run.")
    ] = False,
    store: StoreOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    argo_server: ArgoServerOption = None,
) -> None:
    """End a run on its cluster. Programs get SIGTERM and may save; `tiphys resume` goes on from there."""
    screen: Screen = command.obj
    place = existing_store(screen, store)
    read_run(place, run)
    last = _on_a_cluster(last_submission(place, run), run)
    claim = last.claim
    submitter, _ = cluster_submitter(Where(kubeconfig, context, claim.namespace, argo_server), screen.note)
    must_be_the_cluster_of(last, submitter.cluster, run)
    named = words([("--store", place.url if must_be_named(store) else "")])
    resume = f"`{' '.join(['tiphys', 'resume', run, *named])}`"
    live = _present(last, submitter.find(claim.namespace, claim.workflow_name), submitter.cluster, resume)
    if not live.running:
        screen.note(f"run {run} does not run: its Workflow {live.namespace}/{live.name} is {live.phase}; see {resume}")
        return
    submitter.stop(live, Shutdown.TERMINATE if terminate else Shutdown.STOP)
    how = "ends at once" if terminate else "is being stopped: programs may save first"
    screen.note(f"Workflow {live.namespace}/{live.name} {how}; once it has ended, {resume} goes on")


def _on_a_cluster(last: Submission | None, run: str) -> Submission:
    if last is None:
        raise NotFoundError(f"run {run} was recorded and never submitted; there is nothing to stop")
    if not is_on_cluster(last):
        raise UsageError(
            f"run {run} went to {ran_on(last) or 'an engine on some machine'}: press Ctrl-C where its `tiphys run` or "
            "`tiphys resume` runs, and once more to end it at once"
        )
    return last


def _present(last: Submission, live: LiveWorkflow | None, cluster: str, resume: str) -> LiveWorkflow:
    name = f"{last.claim.namespace}/{last.claim.workflow_name}"
    if live and (last.bound is None or live.uid == last.bound.uid):
        return live
    if not (is_known(cluster) and is_known(ran_on(last))):
        raise NotFoundError(
            f"{cluster} shows no Workflow {name} that is this run's, and whether it belongs to the cluster that the "
            f"run went to ({ran_on(last)}) nobody can tell; give the argo-server that the run was sent through, or a "
            "kubeconfig of its cluster"
        )
    raise NotFoundError(f"Workflow {name} is gone, so nothing runs; what is missing runs with {resume}")
