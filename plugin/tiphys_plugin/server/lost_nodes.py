"""Ends the trainings of lost nodes, so that their next attempts need not wait for Kubernetes, which takes minutes.

`tiphys_plugin.nodes.node_loss` decides. The end of the attempt is recorded first:
if its node is only cut off, nothing that the program commits from then on counts.
Then its pods on lost nodes are marked as Failed and deleted without the word of
their nodes, which starts Argo's next attempt. The next round of any replica deletes
what a service that dies in between has left there.

The pods in which Argo calls its plugins are deleted as well, because nothing else
answers the steps of their Workflow. Trainings without checkpoints, and steps, wait for
Kubernetes: they have no fence, or nothing to go on from.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import structlog

from tiphys.errors import ForbiddenError, TiphysError
from tiphys.kube import KubeApi
from tiphys.kube.resources import AGENT_POD_LABEL, LEASES, NODE_LEASE_NAMESPACE
from tiphys.lineage.training_progress import find_sign_of_life
from tiphys.protocol.gang import GANG_LABEL
from tiphys.protocol.step_spec import ATTEMPT_LABEL, PIPELINE_ANNOTATION, RUN_LABEL, STEP_LABEL
from tiphys.protocol.workflow_nodes import WORKFLOW_LABEL
from tiphys.records import AttemptClaim, task_name
from tiphys.store import RunLayout, find_attempt_end, read_record
from tiphys.store.layout import parse_attempt
from tiphys.store.runs import read_concurrently
from tiphys.threads import BackgroundThread, start_background_thread
from tiphys_plugin.attempts import pods
from tiphys_plugin.cluster.interface import PodStatus
from tiphys_plugin.cluster.kubernetes_cluster import KubernetesCluster
from tiphys_plugin.nodes.health import NodeEvidence
from tiphys_plugin.nodes.node_loss import (
    LOST_SECONDS,
    OVERDUE_SECONDS,
    NodeLeases,
    Silence,
    decide_training_loss,
    observe_leases,
)
from tiphys_plugin.nodes.node_watch import ClusterInventory
from tiphys_plugin.operations import end_attempt
from tiphys_plugin.quota.lease import hash_node_name
from tiphys_plugin.runtime.background import PeriodicTask
from tiphys_plugin.runtime.context import StepCall
from tiphys_plugin.server.tenants import Tenants

_MAX_OBSERVATION_AGE_SECONDS = 15.0
"""What was decided on older observations is not carried out: the process may have been paused in between."""
_SETTLED_SECONDS, _SETTLED_ROUNDS = 120.0, 12
"""A node that has been silent for longer is examined in every twelfth round, unless a training is on it."""
_SURVIVOR_GRACE_SECONDS = 5
"""Grace period of pods of an ended attempt on other nodes: nothing that they save counts any more."""
_EVIDENCE = (NodeEvidence("Lease", f"its kubelet has not renewed it for {LOST_SECONDS:g} s", "cordon"),)
_log = structlog.get_logger()
_AttemptKey = tuple[str, ...]


class _WatchedTraining(NamedTuple):
    """An attempt with pods on silent nodes, and the silence of its program."""

    call: StepCall
    claim: AttemptClaim
    program: Silence
    is_cut_off: bool = False
    """Whether its node is silent and its program is not."""


@dataclass
class LostNodeSweep(PeriodicTask):
    """Examines the nodes.

    One thread per namespace at a time, because a store that does not answer must not delay the others. Without the
    right to list the Leases of nodes it does nothing, and says so once.
    """

    name = "lost_nodes"
    api: KubeApi
    cluster: KubernetesCluster
    tenants: Tenants
    inventory: ClusterInventory
    every_seconds: float = 5.0
    monotonic: Callable[[], float] = time.monotonic
    _leases: NodeLeases = field(default_factory=lambda: NodeLeases({}))
    _is_forbidden: bool = False
    _rounds: int = 0
    _trainings: dict[str, dict[_AttemptKey, _WatchedTraining | None]] = field(default_factory=dict)
    """Attempts on silent nodes, by namespace; None for one that waits for Kubernetes."""
    _workers: dict[str, BackgroundThread | None] = field(default_factory=dict)

    def run_once(self) -> None:
        """Run one round.

        Raises:
            StoreError: the API server did not answer.
        """
        observed_at = self.monotonic()
        renewals = self._list_renewals()
        if renewals is None:
            return
        was_outage, self._leases = self._leases.is_outage, observe_leases(self._leases, renewals, observed_at)
        if self._leases.is_outage and not was_outage:
            _log.warning("nodes.all_silent", nodes=len(renewals), consequence="no node counts as lost")
        lost = self._leases.silent_for(LOST_SECONDS)
        self.inventory.set_external_evidence("Leases", dict.fromkeys(lost, _EVIDENCE))
        found = self._list_pods(self._leases.silent_for(OVERDUE_SECONDS))
        for namespace in self._trainings.keys() - found.keys():
            del self._trainings[namespace]
        for namespace, on_silent_nodes in found.items():
            worker = self._workers.get(namespace)
            if worker is None or not worker.is_alive():
                examine = partial(self._examine, namespace, on_silent_nodes, lost, observed_at)
                self._workers[namespace] = start_background_thread(examine)
            for pod in on_silent_nodes:
                if pod.host in lost and self._is_own_agent(pod) and self._is_recent(observed_at):
                    _log.info("agent_pod.lost", namespace=namespace, pod=pod.name, node=pod.host)
                    self.cluster.delete_pod(pod, grace_seconds=0)
        deadline = time.monotonic() + self.every_seconds
        for worker in self._workers.values():
            if worker is not None:
                worker.join(max(0.0, deadline - time.monotonic()))

    def _list_renewals(self) -> dict[str, str] | None:
        """What each kubelet wrote last into the Lease of its node; None without the right to read it."""
        try:
            listed = self.api.list(LEASES, NODE_LEASE_NAMESPACE).items
        except ForbiddenError as error:
            if not self._is_forbidden:
                remedy = "set nodes.detectLoss: true in the values of the chart"
                _log.warning("nodes.loss_not_detected", error=str(error), remedy=remedy)
            self._is_forbidden = True
            return None
        self._is_forbidden = False
        return {lease["metadata"]["name"]: str((lease.get("spec") or {}).get("renewTime")) for lease in listed}

    def _list_pods(self, silent: Mapping[str, float]) -> dict[str, list[PodStatus]]:
        """Pods on silent nodes by namespace."""
        self._rounds += 1
        watched = (training for trainings in self._trainings.values() for training in trainings.values())
        is_full = any(watched) or self._rounds % _SETTLED_ROUNDS == 0
        found = defaultdict[str, list[PodStatus]](list)
        for node, seconds in silent.items():
            for pod in self.cluster.pods_on_node(node) if is_full or seconds < _SETTLED_SECONDS else ():
                found[pod.namespace].append(pod)
        return found

    def _is_own_agent(self, pod: PodStatus) -> bool:
        """Whether Argo calls plugins for a Workflow of Tiphys in this pod; what others call may not be called twice."""
        name = pod.labels.get(WORKFLOW_LABEL) if AGENT_POD_LABEL in pod.labels.items() else None
        workflow = (self.cluster.workflow(pod.namespace, name) if name else None) or {}
        return PIPELINE_ANNOTATION in ((workflow.get("metadata") or {}).get("annotations") or {})

    def _examine(
        self, namespace: str, on_silent_nodes: Sequence[PodStatus], lost: Mapping[str, float], observed_at: float
    ) -> None:
        before = self._trainings.get(namespace, {})
        trainings: dict[_AttemptKey, _WatchedTraining | None] = {}
        for key, pod in _index_by_attempt(on_silent_nodes).items():
            try:
                training = before[key] if key in before else self._find_training(pod)
                trainings[key] = training
                if training is not None:
                    trainings[key] = self._examine_training(training, lost, observed_at)
            except TiphysError as error:
                _log.warning("lost_nodes.not_examined", namespace=namespace, attempt=key, error=str(error))
            except Exception:  # noqa: BLE001  the worker of a namespace: the others of its trainings must go on
                _log.exception("lost_nodes.crashed", namespace=namespace, attempt=key)
        self._trainings[namespace] = trainings

    def _find_training(self, pod: PodStatus) -> _WatchedTraining | None:
        """The attempt of a training with checkpoints that a pod belongs to; None for any other pod.

        Labels prove nothing, but a namespace has a store of its own, and the uid is that of the pod's Workflow.
        """
        store, layout = self.tenants.stores.store(pod.namespace), RunLayout(pod.labels[RUN_LABEL])
        parsed_keys = filter(None, (parse_attempt(info.key) for info in store.list(layout.attempts)))
        wanted = (pod.labels[STEP_LABEL], pod.labels[ATTEMPT_LABEL], False)
        keys = [
            layout.attempt(step, number)
            for step, number, is_end in parsed_keys
            if (task_name(step), str(number), is_end) == wanted
        ]
        owner = (pod.workflow_uid, pods.hash_instance(pod))
        for claim in read_concurrently(lambda key: read_record(store, key, AttemptClaim), keys):
            if (claim.uid, hash_node_name(claim.instance)) == owner and claim.lineage:
                call = self.tenants.core(pod.namespace).attempt_call(claim)
                return _WatchedTraining(call, claim, Silence(find_sign_of_life(call.store, claim), self.monotonic()))
        return None

    def _examine_training(
        self, training: _WatchedTraining, lost: Mapping[str, float], observed_at: float
    ) -> _WatchedTraining:
        call, claim = training.call, training.claim
        program = training.program.observe(find_sign_of_life(call.store, claim), self.monotonic())
        own = pods.list_attempt_pods(call.store, self.cluster, claim)
        unfinished = [pod for pod in own if not pod.finished]
        members = [pod for pod in unfinished if GANG_LABEL in pod.labels] or unfinished
        min_members = call.spec.gang.min_members if call.spec.gang is not None else None
        is_over = find_attempt_end(call.store, claim.run, claim.step, claim.attempt) is not None
        loss = decide_training_loss(members, lost, program.seconds, min_members, is_over=is_over)
        silent = sorted({pod.host for pod in members if pod.host in lost})
        fields = {"run": claim.run, "step": claim.step, "attempt": claim.attempt, "nodes": silent}
        if loss is not None and self._is_recent(observed_at):
            message = (
                f"no Lease of {', '.join(silent)} was renewed for {min(lost[node] for node in silent):.0f} s, and its "
                f"program stored nothing for {program.seconds:.0f} s"
            )
            if loss.ends_attempt and not is_over:
                end_attempt.end_lost_attempt(call, claim, own, loss.pods, message)
            # The pod in which Argo watches a gang ends with the gang, unless it is on a lost node itself.
            watchers = [pod for pod in unfinished if pod not in members and pod.host in lost]
            self._end_pods([*members, *watchers] if loss.ends_attempt else loss.pods, lost, message)
            _log.warning("training.node_lost", **fields, ends_attempt=loss.ends_attempt, reason=message)
        is_cut_off = bool(silent) and loss is None
        if is_cut_off and not training.is_cut_off:
            _log.warning("training.cut_off", **fields, consequence="its program goes on, so its attempt does")
        return training._replace(program=program, is_cut_off=is_cut_off)

    def _end_pods(self, ended: Sequence[PodStatus], lost: Mapping[str, float], message: str) -> None:
        for pod in sorted(ended, key=lambda pod: pod.host in lost):  # the next round would not find survivors alone
            if pod.host in lost:
                self.cluster.end_lost_pod(pod, message)
            elif not pod.ending:
                self.cluster.delete_pod(pod, _SURVIVOR_GRACE_SECONDS)

    def _is_recent(self, observed_at: float) -> bool:
        return self.monotonic() - observed_at < _MAX_OBSERVATION_AGE_SECONDS


def _index_by_attempt(on_silent_nodes: Sequence[PodStatus]) -> dict[_AttemptKey, PodStatus]:
    labelled = (pod for pod in on_silent_nodes if {ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL} <= pod.labels.keys())
    return {(pod.workflow_uid, pod.labels[ATTEMPT_LABEL], pods.hash_instance(pod)): pod for pod in labelled}
