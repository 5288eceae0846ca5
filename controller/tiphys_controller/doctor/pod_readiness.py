"""Why is a pod not ready? In the words of whoever knows: the process, its container, or Kubernetes. Pure."""

import json

from tiphys.kube import Object

PORT = 7243


def readiness_path(pod: Object) -> str:
    """Path at the API server that leads to the pod's ``/readyz``."""
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}:{PORT}/proxy/readyz"


def is_ready(pod: Object) -> bool:
    """Whether Kubernetes sends it requests."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def runs(pod: Object) -> bool:
    """Whether a container of it runs, so that it can be asked."""
    return any("running" in (one.get("state") or {}) for one in _containers(pod))


def said(body: str) -> str:
    """The reason in an answer of ``/readyz``."""
    try:
        answer = json.loads(body)
        return str(answer.get("error") or answer.get("message") or body)
    except (ValueError, AttributeError):
        return " ".join(body.split())[:300]


def complaints(body: str) -> tuple[str, ...]:
    """What a ready process says does not work, one sentence each."""
    try:
        answer = json.loads(body)
        ledger = (answer.get("ledger") or {}).get("error")
        tenants = [one for one in answer.get("tenants") or [] if one.get("error")]
        stores = [f"namespace {one.get('namespace')}: {one['error']}" for one in tenants]
        return (*([f"the GPU ledger: {ledger}"] if ledger else []), *stores)
    except (ValueError, AttributeError, TypeError):
        return ()


def trouble(pod: Object) -> str:
    """What Kubernetes says of a pod that is not ready."""
    status = pod.get("status") or {}
    for one in _containers(pod):
        if waiting := (one.get("state") or {}).get("waiting"):
            return _sentence(waiting.get("reason"), waiting.get("message"), _last_words(one))
    for condition in status.get("conditions") or []:
        if condition.get("status") == "False" and condition.get("message"):
            return _sentence(condition.get("reason"), condition.get("message"))
    return _sentence(status.get("reason") or status.get("phase"), status.get("message")) or "Kubernetes gives no reason"


def _containers(pod: Object) -> list[Object]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _last_words(container: Object) -> str:
    ended = (container.get("lastState") or {}).get("terminated") or {}
    return f"it ended before with exit code {ended['exitCode']}" if "exitCode" in ended else ""


def _sentence(*parts: object) -> str:
    return ": ".join(str(part) for part in parts if part)
