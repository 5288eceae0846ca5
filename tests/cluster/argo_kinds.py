"""Argo's kinds for a cluster without Argo: the names only, with any content. A cluster that has them keeps its own."""

from cluster.client import Cluster, Json

_GROUP = "argoproj.io"
_KINDS = {
    "workflows": "Workflow",
    "workflowtasksets": "WorkflowTaskSet",
    "workflowtaskresults": "WorkflowTaskResult",
    "workflowtemplates": "WorkflowTemplate",
    "cronworkflows": "CronWorkflow",
}
_WITH_STATUS = "workflowtasksets"
"""The only one whose status is a resource of its own."""


def ensure(cluster: Cluster) -> None:
    """Define what is not defined; returns when the API server serves all of them."""
    names = [f"{plural}.{_GROUP}" for plural in _KINDS]
    found = cluster.kubectl("get", "crd", "-o", "name").split()
    missing = [
        plural for plural in _KINDS if f"customresourcedefinition.apiextensions.k8s.io/{plural}.{_GROUP}" not in found
    ]
    if missing:
        cluster.apply(*map(_definition, missing))
    cluster.established(*names)


def _definition(plural: str) -> Json:
    kind = _KINDS[plural]
    content = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version: Json = {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": content}}
    if plural == _WITH_STATUS:
        version["subresources"] = {"status": {}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{_GROUP}"},
        "spec": {
            "group": _GROUP,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [version],
        },
    }
