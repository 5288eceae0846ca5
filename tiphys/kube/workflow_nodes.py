"""The nodes of a live Workflow, and how its pods name theirs."""

import gzip
import json
from base64 import b64decode

from tiphys.kube.transport import Object
from tiphys.protocol.gang import NODE_ANNOTATION

WORKFLOW_LABEL = "workflows.argoproj.io/workflow"
"""Label of the pods that Argo makes: the name of their Workflow."""
NODE_NAME_ANNOTATION = "workflows.argoproj.io/node-name"
"""Annotation of the pods that Argo makes: the unique name of their node."""


def read_nodes(workflow: Object) -> list[Object]:
    """Nodes of a Workflow by start time, also compressed ones; none where a database has them."""
    status = workflow.get("status") or {}
    nodes: dict[str, Object] = status.get("nodes") or {}
    if compressed := status.get("compressedNodes"):
        nodes = json.loads(gzip.decompress(b64decode(compressed)))
    return sorted(nodes.values(), key=lambda node: str(node.get("startedAt") or ""))


def node_of_pod(pod: Object) -> str:
    """Unique name of the node of a pod, of one of a gang too; empty for a pod of no Workflow."""
    annotations = pod["metadata"].get("annotations") or {}
    return str(annotations.get(NODE_NAME_ANNOTATION) or annotations.get(NODE_ANNOTATION) or "")
