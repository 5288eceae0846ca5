"""Watching a submission on a cluster: it goes on whether anybody watches or not."""

import shlex
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiphys_controller import LiveWorkflow

from hera_pipelines.cli.board import Board
from hera_pipelines.cli.execution import newest_step
from hera_pipelines.cli.failures import RunFailedError, RunInterruptedError
from hera_pipelines.cli.live import watching
from hera_pipelines.cli.node_changes import NodeReader
from hera_pipelines.cli.screen import Screen
from tiphys.errors import ForbiddenError, NotFoundError, StoreError
from tiphys.protocol.pipeline import CompiledPipeline, Manifest
from tiphys.store import Store, submissions

if TYPE_CHECKING:
    from tiphys_controller import ClusterSubmitter


@dataclass(frozen=True)
class ClusterJob:
    """A submission that was created on a cluster.

    ``options`` are those by which a later command finds the store, and
    ``cluster_options`` those by which it finds the cluster.
    """

    run: str
    workflow: LiveWorkflow
    store: Store
    options: tuple[str, ...] = ()
    cluster_options: tuple[str, ...] = ()

    def command(self, verb: str) -> str:
        """A command about this run, as a person types it."""
        there = self.cluster_options
        chosen = {"resume": there, "stop": there, "get": ("--cluster", *there)}.get(verb, ())
        return f"`{shlex.join(['tiphys', verb, self.run, *self.options, *chosen])}`"


def newest_job(
    submitter: "ClusterSubmitter", store: Store, run: str, options: tuple[str, ...], cluster_options: tuple[str, ...]
) -> ClusterJob:
    """The submission of a run that was created a moment ago.

    Raises:
        NotFoundError: its Workflow is gone already.
    """
    claimed = submissions(store, run)[-1].claim
    live = submitter.find(claimed.namespace, claimed.workflow_name)
    if live is None:
        raise NotFoundError(f"Workflow {claimed.namespace}/{claimed.workflow_name} was deleted a moment ago")
    return ClusterJob(run, live, store, options, cluster_options)


def follow(screen: Screen, submitter: "ClusterSubmitter", job: ClusterJob, manifest: Manifest) -> None:
    """Show a submission until it is over, and say how it went.

    Raises:
        RunFailedError: it failed, with the reason of every task that did.
        RunInterruptedError: a person stopped it, or does not want to watch any more.
        NotFoundError: its Workflow was deleted.
    """
    pipeline = CompiledPipeline.from_manifest(manifest)
    tasks = [task["name"] for task in pipeline.tasks()]
    board, reader = Board(tasks), NodeReader(job.workflow.name, tasks)
    last: Manifest = {}
    try:
        with watching(screen, board, newest_step(job.store, job.run, pipeline)) as observe:
            for last in submitter.watch(job.workflow, threading.Event(), _Lost(screen)):
                for change in reader.changes(last):
                    observe(change)
    except KeyboardInterrupt:
        raise RunInterruptedError(
            f"run {job.run} goes on without you; look with {job.command('get')}, end it with {job.command('stop')}"
        ) from None
    except NotFoundError as error:
        raise NotFoundError(f"{error}; what is finished is kept: go on with {job.command('resume')}") from error
    _report(screen, job, board, last)


def _report(screen: Screen, job: ClusterJob, board: Board, last: Manifest) -> None:
    status = last.get("status") or {}
    if status.get("phase") == "Succeeded":
        screen.note(f"run {job.run} succeeded; see {job.command('get')} and {job.command('lineage')}")
        return
    if (last.get("spec") or {}).get("shutdown"):
        raise RunInterruptedError(
            f"run {job.run} was stopped; what is finished is kept; go on with {job.command('resume')}"
        )
    failures = "; ".join(board.failures()) or status.get("message") or f"its Workflow ended as {status.get('phase')}"
    raise RunFailedError(
        f"run {job.run} failed: {failures}; {job.command('get')} says more, and {job.command('resume')} goes on"
    )


class _Lost:
    """Tells once, not at each try, that the API server is out of reach."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._told = ""

    def __call__(self, error: StoreError) -> None:
        if isinstance(error, ForbiddenError):
            raise error  # waiting changes no rights
        if str(error) != self._told:
            self._told = str(error)
            self._screen.note(f"{error}; trying again, and the run goes on meanwhile")
