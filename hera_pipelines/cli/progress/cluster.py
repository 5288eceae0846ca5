"""Watching a submission on a cluster: it goes on whether anybody watches or not.

From a Workflow object as Argo keeps it to the changes that the local engine would report: pure.

So a run on a cluster is shown by the same board as one on this machine.
"""

import re
import shlex
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from tiphys_controller import LiveWorkflow

from hera_pipelines.cli.error_messages import RunFailedError, RunInterruptedError
from hera_pipelines.cli.progress.local import newest_step
from hera_pipelines.cli.progress.table import Board, watching
from hera_pipelines.cli.screen import Screen
from hera_pipelines.local.nodes import NodeChange, NodePhase
from tiphys.errors import ForbiddenError, NotFoundError, StoreError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.records import utc_now
from tiphys.store import Store, submissions

if TYPE_CHECKING:
    from tiphys_controller import ClusterSubmitter


_SILENT = frozenset({"PodInitializing", "ContainerCreating"})
"""What every pod passes through within a moment."""


class NodeReader:
    """Remembers what was reported. ``tasks`` are those of the entry DAG."""

    def __init__(self, workflow: str, tasks: Iterable[str]) -> None:
        self._workflow = workflow
        self._tasks = frozenset(tasks)
        self._seen: dict[str, tuple[NodePhase, str]] = {}

    def changes(self, workflow: Manifest) -> list[NodeChange]:
        """What is new in this state of the Workflow, in the order in which it began.

        Of a Workflow so large that Argo packs its nodes away, nothing is known.
        """
        nodes = ((workflow.get("status") or {}).get("nodes") or {}).values()
        return [
            self._change(node)
            for node in sorted(nodes, key=lambda one: (one.get("startedAt") or "~", one["name"]))
            if self._is_new(node)
        ]

    def _is_new(self, node: Manifest) -> bool:
        state = (_phase(node), _message(node))
        if self._seen.get(node["name"]) == state:
            return False
        self._seen[node["name"]] = state
        return True

    def _change(self, node: Manifest) -> NodeChange:
        phase = _phase(node)
        return NodeChange(
            at=_time(node.get("finishedAt") if phase.finished else node.get("startedAt")),
            node=node["name"],
            task=self._task(node["name"]),
            kind=node.get("type") or "",
            template=node.get("templateName") or "",
            phase=phase,
            message=_message(node),
        )

    def _task(self, node: str) -> str:
        """The task that a node belongs to: the name behind that of the Workflow, up to its item or group."""
        inside = node.removeprefix(f"{self._workflow}.")
        first = re.split(r"[.(\[]", inside, maxsplit=1)[0] if inside != node else ""
        return first if first in self._tasks else ""


def _phase(node: Manifest) -> NodePhase:
    try:
        return NodePhase(node.get("phase") or NodePhase.PENDING)
    except ValueError:
        return NodePhase.RUNNING  # a daemon that has come up, or a word of a later Argo


def _message(node: Manifest) -> str:
    message = str(node.get("message") or "")
    return "" if message in _SILENT else message


def _time(text: str | None) -> datetime:
    return datetime.fromisoformat(text) if text else utc_now()


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
