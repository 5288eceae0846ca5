"""``tiphys recover``: resumes all runs of a cluster that is gone, on another one."""

import shlex
from collections.abc import Sequence
from typing import Annotated

import typer
from tiphys_controller import LostRun, RecoveredRun, TenantSubmitter, count_lost_runs, list_lost_runs, recover_runs

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    ClusterOptions,
    FormatOption,
    StoreOption,
    existing_store,
    with_option_groups,
)
from hera_pipelines.cli.start.submission import DryRunOption
from hera_pipelines.cli.target import cluster_submitter
from tiphys.errors import NotFoundError, TiphysError
from tiphys.store import Store

EXAMPLES = """\b
Examples:
  tiphys recover --store s3://ml-runs/tiphys
  tiphys recover kubernetes:5f1c2d7e0c4b -n ml --dry-run
  tiphys recover kubernetes:5f1c2d7e0c4b -n ml
"""


@with_option_groups
def recover(
    command: typer.Context,
    lost_cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="Name of the cluster that is gone, as this command lists it.")
    ] = "",
    *,
    dry_run: DryRunOption = False,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Runs to resume at once.")] = 8,
    store: StoreOption = None,
    cluster: ClusterOptions,
    output: FormatOption = Format.TABLE,
) -> None:
    """Resume all runs of a cluster that is gone, on the cluster of the kubeconfig.

    Without CLUSTER, lists the other clusters that runs without a recorded end were
    sent to. With it, resumes those runs, in one namespace at a time, as `tiphys
    resume` does: finished steps are skipped, and training steps start from their
    newest valid checkpoints. Only do this when that cluster runs nothing any more.
    Should it still, the new attempts fence the old ones, which then cannot commit.
    The cluster of the kubeconfig may be named itself, as after its etcd was lost:
    then those runs are resumed whose Workflows are gone from it.

    It may be interrupted and repeated: a run that was sent here is not lost any more.
    """
    screen: Screen = command.obj
    run_store = existing_store(screen, store)
    submitter, namespace = cluster_submitter(cluster, screen.note)
    if not lost_cluster:
        _show_clusters(screen, run_store, list_lost_runs(run_store, submitter), output)
        screen.note(f"this cluster is {submitter.cluster}: name it to resume runs whose Workflows are gone from it")
        return
    is_here = lost_cluster == submitter.cluster
    found = list_lost_runs(run_store, submitter, lost_cluster, namespace if is_here else "")
    lost = [run for run in found if run.namespace == namespace]
    for _, other, count in count_lost_runs(found):
        if other != namespace:
            screen.note(f"{count} of its runs belong to namespace {other}: repeat the command with -n {other}")
    if not lost:
        raise NotFoundError(
            f"no run in namespace {namespace} without a recorded end was sent to cluster {lost_cluster}; "
            "`tiphys recover` lists the clusters"
        )
    if dry_run:
        _show_runs(screen, run_store, [RecoveredRun(run.run) for run in lost], output)
        screen.note(f"{len(lost)} runs would be resumed on cluster {submitter.cluster}")
        return
    recovered: list[RecoveredRun] = []
    for run in recover_runs(run_store, TenantSubmitter(submitter, namespace), lost, jobs):
        recovered.append(run)
        became = run.message or (
            f"Workflow {namespace}/{run.workflow_name}" if run.workflow_name else "nothing is missing"
        )
        screen.note(f"{len(recovered)} of {len(lost)}: {run.run}: {became}")
    _show_runs(screen, run_store, recovered, output)
    if refused := [run for run in recovered if run.message]:
        raise TiphysError(
            f"{len(refused)} of {len(lost)} runs were not resumed, {refused[0].run} for one: {refused[0].message}"
        )


def _show_clusters(screen: Screen, store: Store, lost: Sequence[LostRun], output: Format) -> None:
    places = count_lost_runs(lost)
    if output is not Format.TABLE:
        items = [{"cluster": name, "namespace": namespace, "runs": count} for name, namespace, count in places]
        screen.typed_document("LostClusterList", output, store=store.url, clusters=items)
        return
    if places:
        screen.table(("CLUSTER", "NAMESPACE", "RUNS"), [(name, where, str(count)) for name, where, count in places])
        cluster, namespace, _ = places[0]
        screen.note(f"if it is gone: {shlex.join(['tiphys', 'recover', cluster, '-n', namespace])}")
    else:
        screen.note("no run without a recorded end was sent to another cluster")


def _show_runs(screen: Screen, store: Store, runs: Sequence[RecoveredRun], output: Format) -> None:
    if output is not Format.TABLE:
        items = [{"run": run.run, "workflow_name": run.workflow_name, "message": run.message} for run in runs]
        screen.typed_document("RecoveredRunList", output, store=store.url, runs=items)
        return
    screen.table(("RUN", "WORKFLOW", "REFUSED"), [tuple(run) for run in runs], hide=("REFUSED",), wraps=True)
