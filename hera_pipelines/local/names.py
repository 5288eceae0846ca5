"""Names as Argo makes them, because plugins, labels and people key on them.

Source: Argo Workflows ``workflow_types.go`` (NodeID), ``util/pod_name.go``,
``controller/operator.go`` (generateNodeName).
"""

_MAX_POD_PREFIX = 242


def node_id(workflow: str, node: str) -> str:
    """Id of a node: the workflow's name for its root, else name and FNV-1a hash of the node's name."""
    return workflow if node == workflow else f"{workflow}-{_fnv1a(node)}"


def pod_name(workflow: str, node: str, template: str) -> str:
    """Name of the pod that runs ``node``."""
    if node == workflow:
        return workflow
    prefix = f"{workflow}-{template}" if template else workflow
    return f"{prefix[:_MAX_POD_PREFIX]}-{_fnv1a(node)}"


def group_name(node: str, index: int) -> str:
    """Name of the index-th group of a steps node."""
    return f"{node}[{index}]"


def attempt_name(node: str, attempt: int) -> str:
    """Name of the attempt-th try (from 0) of a node with a retryStrategy."""
    return f"{node}({attempt})"


def item_name(name: str, index: int, label: str) -> str:
    """Name of one item of a fan-out: ``sweep(1:code:1,lr:0.2)``. Parentheses in the label are dropped."""
    return f"{name}({index}:{label.replace('(', '').replace(')', '')})"


def display_name(node: str) -> str:
    """The last part of a node's name, as the Argo UI shows it."""
    depth = 0
    for position in range(len(node) - 1, -1, -1):
        character = node[position]
        depth += (character == ")") - (character == "(")
        if depth == 0 and character == ".":
            return node[position + 1 :]
        if depth == 0 and character == "[" and node.endswith("]"):
            return node[position:]
    return node


def _fnv1a(text: str) -> int:
    value = 0x811C9DC5
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value
