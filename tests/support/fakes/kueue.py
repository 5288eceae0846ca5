"""A small Kueue on the API server for tests: queues with a quota, admission by priority and age, eviction.

    with kube_server.serving() as server:
        kueue = FakeKueue(server.api("ml"), research=8)
        backend = KueueAdmission(server.api("ml"), ["ml"])
        backend.request(ask(8))
        kueue.schedule()  # nothing is admitted before

`tests/kueue` shows that a real one does the same.
"""

from collections.abc import Callable
from typing import Any

from tiphys.kube import KubeApi
from tiphys.kube.resources import KUEUE_FLAVORS, KUEUE_LOCAL_QUEUES, KUEUE_WORKLOADS
from tiphys.protocol.step_spec import GPU_RESOURCE

FLAVOR = "a100-reserved"
LABELS = {"nvidia.com/gpu.product": "A100", "pool": "reserved"}
Object = dict[str, Any]


class FakeKueue:
    """Quotas in GPUs by LocalQueue of the namespace of ``api``."""

    def __init__(self, api: KubeApi, *tolerations: Object, flavor: str = FLAVOR, **quotas: int) -> None:
        self._api = api
        self.flavor = flavor
        self.quotas = quotas
        self.on_hold: dict[str, str] = {}
        """Sentences by queue: why it admits nothing."""
        self._arrivals: list[str] = []
        flavor_spec = {"nodeLabels": LABELS, "tolerations": list(tolerations)}
        self._api.create(KUEUE_FLAVORS, None, {"metadata": {"name": flavor}, "spec": flavor_spec})
        for name in quotas:
            spec = {"clusterQueue": f"all-{name}"}
            self._api.create(KUEUE_LOCAL_QUEUES, self._api.namespace, {"metadata": {"name": name}, "spec": spec})

    @property
    def workloads(self) -> list[Object]:
        return self._api.list(KUEUE_WORKLOADS, self._api.namespace).items

    def used(self, queue: str) -> int:
        """GPUs that Kueue counts for the queue."""
        return sum(_usage(one) for one in self.workloads if one["spec"]["queueName"] == queue)

    def schedule(self) -> None:
        """Admit what fits, by priority and then by age; say of the others why they wait."""
        for one in sorted(self.workloads, key=lambda one: (-one["spec"]["priority"], self._arrival(one))):
            if not is_true(one, "QuotaReserved") and not is_true(one, "Finished"):
                self._admit_or_defer(one)

    def evict(self, queue: str = "research", message: str = "Preempted to accommodate a workload") -> None:
        """Mark the admitted Workloads of a queue as Kueue does; it counts them until the reservation is cleared."""
        for one in self.workloads:
            if one["spec"]["queueName"] == queue and is_true(one, "Admitted") and not is_true(one, "Finished"):
                self.set_condition(one, "Evicted", True, "Preempted", message)

    def set_condition(self, workload: Object, kind: str, is_true: bool, reason: str, message: str) -> Object:
        def change(status: Object) -> Object:
            return {**status, "conditions": _conditions(status, kind, is_true, reason, message)}

        return self._change_status(workload, change)

    def _arrival(self, workload: Object) -> int:
        if (uid := workload["metadata"]["uid"]) not in self._arrivals:
            self._arrivals.append(uid)
        return self._arrivals.index(uid)

    def _admit_or_defer(self, workload: Object) -> None:
        queue = workload["spec"]["queueName"]
        free = self.quotas[queue] - self.used(queue)
        pod_set = workload["spec"]["podSets"][0]
        each = int(pod_set["template"]["spec"]["containers"][0]["resources"]["requests"][GPU_RESOURCE])
        counts = range(pod_set["count"], pod_set.get("minCount", pod_set["count"]) - 1, -1)
        fitting = next((count for count in counts if count * each <= free), None)
        if queue in self.on_hold or fitting is None:
            reason = "Suspended" if queue in self.on_hold else "WaitingForQuota"
            message = self.on_hold.get(queue) or f"{free} GPUs are unused"
            self.set_condition(workload, "QuotaReserved", False, reason, message)
            return
        usage = {GPU_RESOURCE: str(fitting * each)}
        assignment = {"name": "main", "count": fitting, "flavors": {GPU_RESOURCE: self.flavor}, "resourceUsage": usage}

        def admit(status: Object) -> Object:
            admitted = {**status, "admission": {"clusterQueue": f"all-{queue}", "podSetAssignments": [assignment]}}
            for kind in ("QuotaReserved", "Admitted"):
                admitted["conditions"] = _conditions(admitted, kind, True, kind, "")
            admitted["conditions"] = _conditions(admitted, "Evicted", False, kind, "")
            return admitted

        self._change_status(workload, admit)

    def _change_status(self, workload: Object, change: Callable[[Object], Object]) -> Object:
        name = workload["metadata"]["name"]
        current = self._api.get(KUEUE_WORKLOADS, self._api.namespace, name)
        assert current is not None
        body = {**current, "status": change(current.get("status", {}))}
        return self._api.replace(KUEUE_WORKLOADS, self._api.namespace, body, "status")


def is_true(workload: Object, kind: str) -> bool:
    """Whether a condition of a Workload is true."""
    conditions = workload.get("status", {}).get("conditions", [])
    return any(one["type"] == kind and one["status"] == "True" for one in conditions)


def _usage(workload: Object) -> int:
    admission = workload.get("status", {}).get("admission")
    if admission is None or is_true(workload, "Finished") or not is_true(workload, "QuotaReserved"):
        return 0
    assignment = admission["podSetAssignments"][0]
    reclaimable = sum(one["count"] for one in workload["status"].get("reclaimablePods", []))
    each = int(assignment["resourceUsage"][GPU_RESOURCE]) // int(assignment["count"])
    return each * min(assignment["count"], workload["spec"]["podSets"][0]["count"] - reclaimable)


def _conditions(status: Object, kind: str, is_true: bool, reason: str, message: str) -> list[Object]:
    others = [one for one in status.get("conditions", []) if one["type"] != kind]
    truth = {"status": "True" if is_true else "False", "reason": reason, "message": message}
    return [*others, {"type": kind, "lastTransitionTime": "2026-01-01T00:00:00Z", **truth}]
