"""How a patch changes an object: merge patches (RFC 7386) and JSON patches (RFC 6902)."""

import copy
from typing import Any

from support.servers.kube_store import RefusedError

Document = Any


def merged(target: Document, patch: Document) -> Document:
    """RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    changed = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            changed.pop(key, None)
        else:
            changed[key] = merged(changed.get(key), value)
    return changed


def edited(target: Document, operations: list[dict[str, Any]]) -> Document:
    """RFC 6902 without move and copy; an operation that does not apply refuses them all."""
    document = copy.deepcopy(target)
    for operation in operations:
        try:
            _apply(document, operation)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            words = f"the server rejected our request due to an error in our request: {operation}: {error}"
            raise RefusedError(422, "Invalid", words) from error
    return document


def _apply(document: Document, operation: dict[str, Any]) -> None:
    *above, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    parent = document
    for part in above:
        parent = parent[int(part)] if isinstance(parent, list) else parent[part]
    key: Any = (len(parent) if last == "-" else int(last)) if isinstance(parent, list) else last
    match operation["op"]:
        case "test":
            if parent[key] != operation["value"]:
                raise ValueError("the test failed")
        case "remove":
            del parent[key]
        case "replace" if isinstance(parent, list):
            parent[key] = operation["value"]
        case "add" if isinstance(parent, list):
            parent.insert(key, operation["value"])
        case "add" | "replace":  # unlike the RFC, Kubernetes replaces also what is not there
            parent[key] = operation["value"]
        case other:
            raise ValueError(f"unknown operation {other}")
