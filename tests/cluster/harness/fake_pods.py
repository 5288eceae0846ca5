"""What is said of a pod on a fake node: it runs at once, until somebody deletes it.

kwok's own stages end the pods of Jobs at once as well. That would free the GPUs of one member of a gang while the
scheduler still looks for a place for the next, which then may go to the same node.
"""

from typing import Any

_RUNNING = """
{{ $now := Now }}
phase: Running
hostIP: {{ NodeIPWith .spec.nodeName | Quote }}
podIP: {{ PodIPWith .spec.nodeName ( or .spec.hostNetwork false ) ( or .metadata.uid "" ) ( or .metadata.name "" ) ( or .metadata.namespace "" ) | Quote }}
startTime: {{ $now | Quote }}
conditions:
{{ range $type := list "Initialized" "Ready" "ContainersReady" }}
- {type: {{ $type }}, status: "True", lastTransitionTime: {{ $now | Quote }}}
{{ end }}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  ready: true
  restartCount: 0
  state: {running: {startedAt: {{ $now | Quote }}}}
{{ end }}
"""  # noqa: E501  a template of one line


def _stage(name: str, selector: dict[str, str], then: dict[str, Any]) -> dict[str, Any]:
    """A rule for the pods whose fields, given by path, are there or not."""
    expressions = [{"key": path, "operator": operator} for path, operator in selector.items()]
    pods = {"apiGroup": "v1", "kind": "Pod"}
    spec = {"resourceRef": pods, "selector": {"matchExpressions": expressions}, "next": then}
    return {"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "Stage", "metadata": {"name": name}, "spec": spec}


_DELETED, _ADDRESS = ".metadata.deletionTimestamp", ".status.podIP"
STAGES = [
    _stage("pod-runs", {_DELETED: "DoesNotExist", _ADDRESS: "DoesNotExist"}, {"statusTemplate": _RUNNING}),
    _stage("pod-goes", {_DELETED: "Exists"}, {"finalizers": {"empty": True}, "delete": True}),
]
"""They take the place of all that kwok would do to pods."""
