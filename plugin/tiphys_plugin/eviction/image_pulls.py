"""Ends attempts whose image cannot be pulled, so that they do not hold their GPUs for ever.

Argo waits for such a pod without a limit. The end record is written before the pods are deleted, because a deleted
pod looks like a preempted one.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import structlog

from tiphys.errors import TiphysError
from tiphys.failures.classify import IMAGE_NAME_REASONS, IMAGE_PULL_REASONS, AttemptObservation, classify_failure
from tiphys.protocol.gang import GANG_LABEL
from tiphys.protocol.step_spec import ATTEMPT_LABEL
from tiphys.records import AttemptClaim, AttemptEnd, AttemptEndOutcome, FailureEvidence, utc_now
from tiphys.store import RunLayout, Store, claim_record, find_record
from tiphys_plugin.attempts import pods
from tiphys_plugin.attempts.liveness import NamespaceStores, find_gang
from tiphys_plugin.cluster.interface import Cluster, PodStatus
from tiphys_plugin.eviction.evict import can_lose_members, list_unfinished_pods
from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.quota.lease import Lease, LeaseRequest
from tiphys_plugin.runtime.background import PeriodicTask
from tiphys_plugin.runtime.settings import IMAGE_PULL_TIMEOUT_SECONDS

_AttemptKey = tuple[str, str, str, str]
"""Namespace, uid of the Workflow, attempt and hash of the instance; pods of other namespaces can have any labels."""
_log = structlog.get_logger()


@dataclass
class ImagePullSweep(PeriodicTask):
    """Looks at the pods of attempts with GPUs.

    An image name that is not valid ends its attempt at once; an image that cannot be pulled does so when it has been
    seen failing for ``timeout_seconds``.
    """

    name = "image_pulls"
    ledger: AdmissionBackend
    cluster: Cluster
    stores: NamespaceStores
    timeout_seconds: float = IMAGE_PULL_TIMEOUT_SECONDS
    every_seconds: float = 15.0
    clock: Callable[[], datetime] = utc_now
    _failing_since: dict[str, datetime] = field(default_factory=dict)
    _messages: dict[str, str] = field(default_factory=dict)
    """The last answer of the registry, by uid of the pod; the back-off between two tries may not name it."""

    def run_once(self) -> None:
        """Run one round; lists no pods while no lease is held.

        Raises:
            StoreError: ledger or cluster did not answer.
        """
        leases = [lease for lease in self.ledger.snapshot().leases if self.stores.serves(lease.request.namespace)]
        pending = self.cluster.attempt_pods(pending_only=True) if leases else []
        failing = [pod for pod in pending if _cannot_pull(pod)]
        self._note_failures(failing)
        failing_by_attempt = defaultdict[_AttemptKey, list[PodStatus]](list)
        for pod in failing:
            key = (pod.namespace, pod.workflow_uid, pod.labels[ATTEMPT_LABEL], pods.hash_instance(pod))
            failing_by_attempt[key].append(pod)
        for lease in leases:
            own = failing_by_attempt[_attempt_key(lease.request)]
            if overdue := next(filter(self._is_over, own), None):
                self._end_attempt(lease, overdue, own)

    def _note_failures(self, failing: list[PodStatus]) -> None:
        now = self.clock()
        self._failing_since = {pod.uid: self._failing_since.get(pod.uid, now) for pod in failing}
        self._messages = {
            pod.uid: pod.message if pod.reason != "ImagePullBackOff" else self._messages.get(pod.uid, pod.message)
            for pod in failing
        }

    def _is_over(self, pod: PodStatus) -> bool:
        failing_seconds = (self.clock() - self._failing_since[pod.uid]).total_seconds()
        return pod.reason in IMAGE_NAME_REASONS or failing_seconds >= self.timeout_seconds

    def _end_attempt(self, lease: Lease, overdue: PodStatus, failing: Sequence[PodStatus]) -> None:
        """End the attempt of ``lease``; an elastic gang that can continue without ``failing`` loses only them."""
        request = lease.request
        try:
            pods_to_end = list_unfinished_pods(self.cluster, lease)
            if can_lose_members(request.min_members, pods_to_end, failing):
                pods_to_end = list(failing)
            else:
                store = self.stores.store(request.namespace)
                if not self._record_end(store, lease, overdue):
                    return
                gang = find_gang(store, self.cluster, request) if GANG_LABEL in overdue.labels else None
                if gang is not None:
                    self.cluster.delete_gang(gang)
            for pod in pods_to_end:
                self.cluster.delete_pod(pod)
            _log.warning("image.not_pulled", **request.log_fields, pods=len(pods_to_end), reason=overdue.reason)
        except TiphysError as error:
            _log.error("image.attempt_not_ended", **request.log_fields, error=str(error))

    def _record_end(self, store: Store, lease: Lease, pod: PodStatus) -> bool:
        """Record the end of the attempt; False if it was never claimed."""
        request, layout = lease.request, RunLayout(lease.request.run)
        claim = find_record(store, layout.attempt(request.step, request.attempt), AttemptClaim)
        if claim is None:
            return False
        verdict = classify_failure(
            AttemptObservation(pod_seen=True, pod_reason=pod.reason, pod_message=self._messages[pod.uid])
        )
        end = AttemptEnd(
            run=request.run,
            step=request.step,
            attempt=request.attempt,
            submission=claim.submission,
            outcome=AttemptEndOutcome.FAILED,
            cause=verdict.cause,
            message=verdict.evidence,
            evidence=FailureEvidence(rule=verdict.rule, matched_text=verdict.matched_text, node=pod.host),
            step_key=claim.step_key,
        )
        claim_record(store, layout.attempt_end(request.step, request.attempt), end)
        return True


def _attempt_key(request: LeaseRequest) -> _AttemptKey:
    return request.namespace, request.uid, str(request.attempt), request.instance_hash


def _cannot_pull(pod: PodStatus) -> bool:
    return not pod.finished and not pod.ending and pod.reason in (*IMAGE_PULL_REASONS, *IMAGE_NAME_REASONS)
