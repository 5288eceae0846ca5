"""Workflow and agent pod objects as Argo leaves them in the API server, as far as Tiphys reads them."""

from typing import Any

from support.servers.kube_server import KubeServer
from tiphys.kube import KubeApi, Object
from tiphys.kube.resources import PODS, WORKFLOWS
from tiphys.protocol.step_spec import GENERATED_TEXT_ANNOTATION, PIPELINE_ANNOTATION, STORE_ANNOTATION

NARRATED = {
    GENERATED_TEXT_ANNOTATION: "title,description",
    "workflows.argoproj.io/title": "digits",
    "workflows.argoproj.io/description": "Pipeline `digits`.",
}


def workflow(
    name: str = "digits-1",
    phase: str = "Running",
    *,
    namespace: str = "ml",
    store: str = "",
    run: str = "",
    spec: Object | None = None,
    status: Object | None = None,
    annotations: dict[str, str] | None = None,
    **metadata: Any,
) -> Object:
    """A Workflow of pipeline ``digits``; ``phase`` empty: Argo has not looked at it yet."""
    given = [{"name": "tiphys-run", "value": run}, {"name": "tiphys-submission", "value": ""}]
    completed = {"workflows.argoproj.io/completed": "true"} if phase in ("Succeeded", "Failed", "Error") else {}
    written = {PIPELINE_ANNOTATION: "digits", STORE_ANNOTATION: store} | (
        NARRATED if annotations is None else annotations
    )
    made: Object = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-of-{name}",
            "labels": {PIPELINE_ANNOTATION: "digits", **completed},
            "annotations": written,
            **metadata,
        },
        "spec": {"entrypoint": "main", "arguments": {"parameters": given}, **(spec or {})},
    }
    return {**made, "status": {"phase": phase, **(status or {})}} if phase else made


def agent_pod(name: str = "digits-1-1340600742-agent", owner: str = "uid-of-digits-1", phase: str = "Failed") -> Object:
    """The agent pod of a Workflow."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": f"uid-of-{name}",
            "labels": {"workflows.argoproj.io/component": "agent"},
            "ownerReferences": [{"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "x", "uid": owner}],
        },
        "status": {"phase": phase, "reason": "Evicted", "message": "The node was low on resource: memory."},
    }


def put(api: KubeApi, workflow_object: Object) -> Object:
    """Create it; the server gives it its uid."""
    return api.create(WORKFLOWS, workflow_object["metadata"]["namespace"], workflow_object)


def put_agent(api: KubeApi, owner: Object, name: str = "digits-1-1340600742-agent", phase: str = "Failed") -> Object:
    """Create the agent pod of a Workflow that is in the server."""
    return api.create(PODS, "ml", agent_pod(name, owner["metadata"]["uid"], phase))


def posted_events(server: KubeServer) -> list[tuple[str, str]]:
    """Reason and message of every Event that there is, in the order of their times."""
    events = sorted(
        server.objects("events"), key=lambda one: (one["lastTimestamp"], one["metadata"]["resourceVersion"])
    )
    return [(one["reason"], one["message"]) for one in events]
