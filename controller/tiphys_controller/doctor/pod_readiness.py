"""Explains why a pod is not ready, from its ``/readyz``, its container status or its conditions. Pure."""

import json

from tiphys.kube import Object

READINESS_PORT = 7243


def build_readiness_path(pod: Object) -> str:
    """Path at the API server that leads to the pod's ``/readyz``, over TLS if its probe uses TLS."""
    metadata = pod["metadata"]
    containers = (pod.get("spec") or {}).get("containers") or []
    probes = [((container.get("readinessProbe") or {}).get("httpGet") or {}).get("scheme") for container in containers]
    name = f"https:{metadata['name']}" if "HTTPS" in probes else metadata["name"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{name}:{READINESS_PORT}/proxy/readyz"


def is_pod_ready(pod: Object) -> bool:
    """Whether Kubernetes considers the pod ready, and so routes requests to it."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions)


def has_running_container(pod: Object) -> bool:
    """Whether a container of the pod runs, so that it can answer ``/readyz``."""
    return any("running" in (status.get("state") or {}) for status in container_statuses(pod))


def parse_readiness_reason(body: str) -> str:
    """Parse the reason in a response of ``/readyz``."""
    try:
        answer = json.loads(body)
        return str(answer.get("error") or answer.get("message") or body)
    except (ValueError, AttributeError):
        return " ".join(body.split())[:300]


def parse_partial_failures(body: str) -> tuple[str, ...]:
    """Parse the failures that a ready process reports; without a token it names no namespace."""
    try:
        failing = int((json.loads(body).get("tenants") or {}).get("failing") or 0)
        return (f"stores that do not answer: {failing}; the log names them (tenant.store_unavailable)",) * bool(failing)
    except (ValueError, AttributeError, TypeError):
        return ()


def parse_ledger_failure(body: str) -> str:
    """Parse why a ready process cannot use the GPU ledger; empty if it can."""
    try:
        return str((json.loads(body).get("ledger") or {}).get("error") or "")
    except (ValueError, AttributeError):
        return ""


def describe_not_ready(pod: Object) -> str:
    """Describe why a pod is not ready, by its status in Kubernetes."""
    status = pod.get("status") or {}
    for container in container_statuses(pod):
        if waiting := (container.get("state") or {}).get("waiting"):
            return _join_parts(waiting.get("reason"), waiting.get("message"), _describe_last_exit(container))
    for condition in status.get("conditions") or []:
        if condition.get("status") == "False" and condition.get("message"):
            return _join_parts(condition.get("reason"), condition.get("message"))
    return (
        _join_parts(status.get("reason") or status.get("phase"), status.get("message")) or "Kubernetes gives no reason"
    )


def container_statuses(pod: Object) -> list[Object]:
    """Statuses of the containers of a pod, those of init containers first."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _describe_last_exit(container: Object) -> str:
    ended = (container.get("lastState") or {}).get("terminated") or {}
    return f"it ended before with exit code {ended['exitCode']}" if "exitCode" in ended else ""


def _join_parts(*parts: object) -> str:
    return ": ".join(str(part) for part in parts if part)
