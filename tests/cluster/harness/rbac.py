"""Helpers of the cluster get an account each, with no more rights than they need: one that may do everything would hide
what the others are allowed to.
"""

from .kubectl import apply
from .settings import Settings

_GROUP = "rbac.authorization.k8s.io"


def grant(settings: Settings, user: str, rules: list[dict[str, list[str]]]) -> None:
    """Allow a user this, in all namespaces."""
    kinds = {"apiVersion": f"{_GROUP}/v1", "metadata": {"name": user}}
    role = {"apiGroup": _GROUP, "kind": "ClusterRole", "name": user}
    subject = {"apiGroup": _GROUP, "kind": "User", "name": user}
    apply(settings, {**kinds, "kind": "ClusterRole", "rules": rules})
    apply(settings, {**kinds, "kind": "ClusterRoleBinding", "roleRef": role, "subjects": [subject]})
