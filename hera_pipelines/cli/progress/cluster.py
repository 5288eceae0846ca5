"""Shows a submission on a cluster until it ends.

`NodeChangeReader` turns the states of an Argo Workflow object into the changes
that the local engine would report, so that both kinds of runs share one progress
table. Ctrl-C ends the display only; the run continues on the cluster.
"""

import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from tiphys_controller import LiveWorkflow

from hera_pipelines.cli.error_messages import RunInterruptedError
from hera_pipelines.cli.progress.local import FollowedSubmission, build_training_lookup, report_end
from hera_pipelines.cli.progress.table import ProgressTable, show_live_progress
from hera_pipelines.cli.screen import Screen
from hera_pipelines.local.nodes import NodeChange, NodePhase
from tiphys.errors import ForbiddenError, NotFoundError, StoreError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.workflow_nodes import without_try
from tiphys.records import SubmissionClaim, utc_now
from tiphys.store import Store

if TYPE_CHECKING:
    from tiphys_controller import ClusterSubmitter


_IGNORED_MESSAGES = frozenset({"PodInitializing", "ContainerCreating"})
"""Messages of the first seconds of every pod."""


class NodeChangeReader:
    """Reports each node state of one Workflow once. ``tasks`` are the tasks of the entry DAG."""

    def __init__(self, workflow: str, tasks: Iterable[str]) -> None:
        self._workflow = workflow
        self._tasks = frozenset(tasks)
        self._reported: dict[str, tuple[NodePhase, str]] = {}

    def changes(self, workflow: Manifest) -> list[NodeChange]:
        """Changes since the last call, in the order in which they happened: a node ends after those inside it.

        Argo compresses or offloads the nodes of a very large Workflow; then there are no changes to report.
        """
        nodes = ((workflow.get("status") or {}).get("nodes") or {}).values()
        return [self._change(node) for node in sorted(nodes, key=_order_of_change) if self._is_new(node)]

    def _is_new(self, node: Manifest) -> bool:
        state = (_phase(node), _message(node))
        if self._reported.get(node["name"]) == state:
            return False
        self._reported[node["name"]] = state
        return True

    def _change(self, node: Manifest) -> NodeChange:
        phase = _phase(node)
        return NodeChange(
            changed_at=_parse_time(node.get("finishedAt") if phase.finished else node.get("startedAt")),
            node=node["name"],
            task=self._task(node["name"]),
            kind=node.get("type") or "",
            template=node.get("templateName") or "",
            phase=phase,
            message=_message(node),
        )

    def _task(self, node: str) -> str:
        """Task of a node: the part of its name after the Workflow's name, without item and step group."""
        inside = node.removeprefix(f"{self._workflow}.")
        first = re.split(r"[.(\[]", inside, maxsplit=1)[0] if inside != node else ""
        return first if first in self._tasks else ""


def _order_of_change(node: Manifest) -> tuple[str, bool, int, str]:
    # Argo's times are whole seconds, and a task starts in the second in which the one before it ended.
    is_finished, name = _phase(node).finished, node["name"]
    moment = (node.get("finishedAt") if is_finished else node.get("startedAt")) or "~"
    depth = name.count(".") + (without_try(name) != name)
    return moment, not is_finished, -depth if is_finished else depth, name


def _phase(node: Manifest) -> NodePhase:
    try:
        return NodePhase(node.get("phase") or NodePhase.PENDING)
    except ValueError:
        return NodePhase.RUNNING  # "Daemoned", or a phase of a later Argo version


def _message(node: Manifest) -> str:
    message = str(node.get("message") or "")
    return "" if message in _IGNORED_MESSAGES else message


def _parse_time(text: str | None) -> datetime:
    return datetime.fromisoformat(text) if text else utc_now()


@dataclass(frozen=True)
class ClusterSubmission(FollowedSubmission):
    """A submission to a cluster, which a later command finds by ``cluster_arguments``."""

    workflow: LiveWorkflow
    cluster_arguments: tuple[str, ...] = ()

    def options_of(self, verb: str) -> tuple[str, ...]:
        cluster = self.cluster_arguments
        return {"resume": cluster, "stop": cluster, "get": ("--cluster", *cluster)}.get(verb, ())


def find_cluster_submission(
    submitter: "ClusterSubmitter",
    store: Store,
    claim: SubmissionClaim,
    store_arguments: tuple[str, ...],
    cluster_arguments: tuple[str, ...],
) -> ClusterSubmission:
    """Find the Workflow of a submission on the cluster.

    Raises:
        NotFoundError: it was deleted already.
    """
    live = submitter.find(claim.namespace, claim.workflow_name)
    if live is None:
        raise NotFoundError(f"Workflow {claim.namespace}/{claim.workflow_name} was deleted just after its creation")
    return ClusterSubmission(claim.run, live.name, store, store_arguments, live, cluster_arguments)


def show_watched_workflow(
    screen: Screen, submission: FollowedSubmission, manifest: Manifest, workflows: Iterable[Manifest]
) -> tuple[ProgressTable, Manifest]:
    """Show the progress of a submission while its Workflow is watched.

    ``manifest`` is its compiled Workflow, and ``workflows`` the states of the Workflow, one for each change. Returns
    the progress table, and the last state of the Workflow; empty without one.

    Raises:
        RunInterruptedError: a person pressed Ctrl-C to end the display.
    """
    pipeline = CompiledPipeline.from_manifest(manifest)
    tasks = [task["name"] for task in pipeline.tasks()]
    progress, reader = ProgressTable(tasks), NodeChangeReader(submission.workflow_name, tasks)
    workflow: Manifest = {}
    try:
        with show_live_progress(
            screen, progress, build_training_lookup(submission.store, submission.run, pipeline)
        ) as observe:
            for workflow in workflows:
                for change in reader.changes(workflow):
                    observe(change)
    except KeyboardInterrupt:
        place = " on the cluster" if isinstance(submission, ClusterSubmission) else ""
        raise RunInterruptedError(
            f"run {submission.run} continues{place}; show it with {submission.command('get')}, stop it with "
            f"{submission.command('stop')}"
        ) from None
    return progress, workflow


def follow_submission(
    screen: Screen, submitter: "ClusterSubmitter", submission: ClusterSubmission, manifest: Manifest
) -> None:
    """Show the progress of a submission until its Workflow ends, then report the result.

    Raises:
        RunFailedError: the run failed; the message names each failed task and its reason.
        RunInterruptedError: a person stopped the run, or pressed Ctrl-C to end the display.
        NotFoundError: the Workflow was deleted.
    """
    workflows = submitter.watch(submission.workflow, threading.Event(), _ConnectionLossNotice(screen))
    try:
        progress, workflow = show_watched_workflow(screen, submission, manifest, workflows)
    except NotFoundError as error:
        raise NotFoundError(
            f"{error}; finished steps and checkpoints are kept: continue with {submission.command('resume')}"
        ) from error
    report_end(screen, submission, progress, workflow)


class _ConnectionLossNotice:
    """Reports a lost connection to the API server once, not at every retry."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._last_message = ""

    def __call__(self, error: StoreError) -> None:
        if isinstance(error, ForbiddenError):
            raise error  # a retry does not change permissions
        if str(error) != self._last_message:
            self._last_message = str(error)
            self._screen.note(f"{error}; retrying, while the run continues")
