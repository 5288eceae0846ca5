"""Finds the output of the programs of one attempt: of its pods, of the local engine, or in Argo's archive."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from tiphys_plugin.attempts.pods import list_attempt_pods, parse_try_number, read_submission_bound
from tiphys_plugin.cluster.interface import Cluster, DirectoryCluster, PodStatus
from tiphys_plugin.cluster.kubernetes_cluster import KubernetesCluster
from tiphys_plugin.cluster.pod_status import pod_status

from hera_pipelines.cli.target import find_local_workflows, is_on_cluster
from hera_pipelines.local.live_workflows import LocalWorkflows
from hera_pipelines.local.pods.pod_files import pod_log_path
from tiphys.errors import NotFoundError, UsageError
from tiphys.kube import KubeApi, Object, identify_cluster
from tiphys.kube.resources import PODS, WORKFLOWS
from tiphys.protocol.execute_api import find_artifact_place
from tiphys.protocol.operations import attempt_node_name
from tiphys.protocol.workflow_nodes import WORKFLOW_LABEL, read_nodes, without_try
from tiphys.records import AttemptClaim
from tiphys.store import RunLayout, Store, Submission
from tiphys.store.program_output import list_output_chunks, read_program_output

_MAIN_CONTAINER = "main"
_ARCHIVED_LOG = "main-logs"
"""Name of the artifact in which Argo archives the log of a pod (Argo, ``workflow/common``)."""
_EXECUTOR_MARK = " argo=true"
"""In the lines that Argo's executor writes into the log of the program (Argo, ``cmd/argoexec/commands``)."""
_EXECUTOR_LINES = 50
"""More than it writes after a program."""
_POLL_SECONDS = 0.5


class PodLog(NamedTuple):
    pod: str
    source: str
    """Where it comes from, as words."""
    lines: Iterator[str]


def choose_pod_logs(
    store: Store, submission: Submission, connect: Callable[[], KubeApi]
) -> "LocalPodLogs | ClusterPodLogs":
    """Where the output of the attempts of a submission is: on its cluster, or in the files of its engine.

    Raises:
        UsageError: its engine ran on another machine, or is not recorded.
    """
    if is_on_cluster(submission):
        return ClusterPodLogs(store, connect())
    return LocalPodLogs(store, find_local_workflows(submission, submission.claim.run))


class LocalPodLogs:
    """Files of the local engine."""

    def __init__(self, store: Store, workflows: LocalWorkflows) -> None:
        self._store = store
        self._state = workflows.state
        self._cluster = DirectoryCluster(workflows.state / "cluster")

    def find(
        self, claim: AttemptClaim, tail: int | None, follow: bool, max_bytes: int | None = None
    ) -> Iterator[PodLog]:
        """The logs of the pods of an attempt, in the order of their start.

        Without ``tail`` all lines are read; with ``follow`` it goes on until the pods end. ``max_bytes`` are the most
        to read of a file, from its end, or of the last lines of a pod.
        """
        for pod in self._pods(claim):
            path = pod_log_path(self._state, pod.name)
            if path.exists():
                yield PodLog(pod.name, str(path), self._read(claim, pod, path, tail, follow, max_bytes))

    def _pods(self, claim: AttemptClaim) -> list[PodStatus]:
        if not _is_ungated(claim):
            return list_attempt_pods(self._store, self._cluster, claim)
        return _pods_of_tries(claim, self._cluster.workflow_pods(claim.uid))

    def _read(
        self, claim: AttemptClaim, pod: PodStatus, path: Path, tail: int | None, follow: bool, max_bytes: int | None
    ) -> Iterator[str]:
        with path.open("rb") as file, TextIOWrapper(file, encoding="utf-8", errors="replace") as log:
            if max_bytes is not None:
                file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
            yield from deque(log, tail)
            while follow:
                has_ended = self._has_ended(claim, pod.name)
                yield from log
                if has_ended:
                    return
                time.sleep(_POLL_SECONDS)

    def _has_ended(self, claim: AttemptClaim, name: str) -> bool:
        pods = {pod.name: pod for pod in self._pods(claim)}
        return name not in pods or pods[name].finished


class ClusterPodLogs:
    """Pods of a cluster and, once they are gone, what Argo archived of them in the store."""

    def __init__(self, store: Store, api: KubeApi) -> None:
        self._store = store
        self._api = api
        self._cluster: Cluster = KubernetesCluster(api, None, identify_cluster(api))

    def find(
        self, claim: AttemptClaim, tail: int | None, follow: bool, max_bytes: int | None = None
    ) -> Iterator[PodLog]:
        """As `LocalPodLogs.find`."""
        found = False
        for pod in self._pods(claim):
            if (lines := self._read_pod(pod, tail, follow, max_bytes)) is not None:
                found = True
                yield PodLog(pod.name, f"pod in {pod.namespace}", lines)
        if not found:
            yield from self._find_archived(claim, tail, max_bytes)

    def _pods(self, claim: AttemptClaim) -> list[PodStatus]:
        if not _is_ungated(claim):
            return list_attempt_pods(self._store, self._cluster, claim)
        bound = read_submission_bound(self._store, self._cluster, claim)
        listed = self._api.list(PODS, bound.namespace, f"{WORKFLOW_LABEL}={bound.workflow_name}").items
        return _pods_of_tries(claim, (pod for pod in map(pod_status, listed) if pod.workflow_uid == claim.uid))

    def _read_pod(self, pod: PodStatus, tail: int | None, follow: bool, max_bytes: int | None) -> Iterator[str] | None:
        manifest = self._api.get(PODS, pod.namespace, pod.name)
        if manifest is None:
            return None
        query = {
            "container": _program_container(manifest),
            "tailLines": "" if tail is None else str(tail if follow else tail + _EXECUTOR_LINES),
            "follow": "true" if follow else "",
            **({} if max_bytes is None else {"limitBytes": str(max_bytes)}),
        }
        try:
            lines = self._api.read_lines(PODS.object_path(pod.namespace, pod.name, "log"), query)
        except (NotFoundError, UsageError):  # deleted meanwhile, or its container has not started
            return None
        of_program = (line for line in lines if _EXECUTOR_MARK not in line)
        return of_program if follow else iter(deque(of_program, tail))

    def _find_archived(self, claim: AttemptClaim, tail: int | None, max_bytes: int | None) -> Iterator[PodLog]:
        bound = read_submission_bound(self._store, self._cluster, claim)
        workflow = self._api.get(WORKFLOWS, bound.namespace, bound.workflow_name)
        prefix = claim.instance if _is_ungated(claim) else attempt_node_name(claim.node)
        for node in read_nodes(workflow or {}):
            name = str(node["name"])
            is_own = without_try(name) == prefix if _is_ungated(claim) else name.startswith(f"{prefix}.run")
            # The node of all tries has the outputs of the last.
            key = _archived_log_key(node) if is_own and node.get("type") == "Pod" else ""
            stored = self._store.from_artifact_key(key) if key else None
            if stored is not None:
                text = self._read_archived(stored, max_bytes).decode(errors="replace")
                yield PodLog(node["id"], f"archived by Argo as {stored}", iter(deque(text.splitlines(True), tail)))

    def _read_archived(self, key: str, max_bytes: int | None) -> bytes:
        if max_bytes is None:
            return self._store.read(key)
        end = b""
        for chunk in self._store.chunks(key):
            end = (end + chunk)[-max_bytes:]
        return end


class StoredLogs:
    """What training programs stored of their own output."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def find(self, claim: AttemptClaim, tail: int | None) -> Iterator[PodLog]:
        """The stored output of an attempt; none if its program stored none."""
        layout = RunLayout(claim.run)
        if list_output_chunks(self._store, layout, claim.step, claim.attempt):
            lines = read_program_output(self._store, layout, claim.step, claim.attempt, last_lines=tail)
            source = f"stored by the program below {layout.program_output(claim.step, claim.attempt)}"
            yield PodLog("", source, iter(lines))


def _is_ungated(claim: AttemptClaim) -> bool:
    """Whether the attempt is of a step without a gate, whose pods have no labels of Tiphys."""
    return claim.node == claim.instance


def _pods_of_tries(claim: AttemptClaim, pods: Iterable[PodStatus]) -> list[PodStatus]:
    """The pods of an attempt of a step without a gate among those of its Workflow, in the order of its tries."""
    own = [pod for pod in pods if without_try(pod.node) == claim.instance]
    return sorted(own, key=lambda pod: (parse_try_number(pod.node), pod.name))


def _program_container(pod: Object) -> str:
    names = [container["name"] for container in pod["spec"]["containers"]]
    return _MAIN_CONTAINER if _MAIN_CONTAINER in names else str(names[0])


def _archived_log_key(node: dict[str, Any]) -> str:
    for artifact in (node.get("outputs") or {}).get("artifacts") or []:
        if artifact.get("name") == _ARCHIVED_LOG:
            place = find_artifact_place(artifact)
            return place.key if place else ""
    return ""
