"""Accounts: one with rights of a test's choice; what one may do, as its roles say, and what it was seen doing.

All in the words of RBAC.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from cluster.client import AuditLog, Cluster, Json

_RBAC = "rbac.authorization.k8s.io"


class Right(NamedTuple):
    """``resource`` carries its subresource, as in a rule; ``namespace`` is empty for a right in all of them."""

    verb: str
    group: str
    resource: str
    namespace: str


def new_account(cluster: Cluster, namespace: str, account: str, rules: Sequence[Json], folder: Path) -> Path:
    """Kubeconfig, in ``folder``, of an account that may do in its namespace what ``rules`` say, and nothing else."""
    grant(cluster, namespace, account, rules)
    cluster.wait(f"{account} may do it", lambda: _may(cluster, namespace, account, rules))
    return as_account(cluster, namespace, account, folder)


def as_account(cluster: Cluster, namespace: str, account: str, folder: Path) -> Path:
    """Kubeconfig, in ``folder``, of an account of ``namespace``."""
    token = cluster.kubectl("create", "token", account, "--namespace", namespace, "--duration=2h").strip()
    own = yaml.safe_load(cluster.kubeconfig.read_text())
    own["users"] = [{"name": user["name"], "user": {"token": token}} for user in own["users"]]
    for context in own["contexts"]:
        context["context"]["namespace"] = namespace
    file = folder / f"kubeconfig-of-{account}"
    file.touch(mode=0o600)
    file.write_text(yaml.safe_dump(own))
    return file


def grant(cluster: Cluster, namespace: str, account: str, rules: Sequence[Json]) -> None:
    """Have the account, which is made if need be, do in its namespace what ``rules`` say, and nothing else."""
    named = {"name": account, "namespace": namespace}
    role = {"apiGroup": _RBAC, "kind": "Role", "name": account}
    subject = {"kind": "ServiceAccount", **named}
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": named},
        {"apiVersion": f"{_RBAC}/v1", "kind": "Role", "metadata": named, "rules": list(rules)},
        {"apiVersion": f"{_RBAC}/v1", "kind": "RoleBinding", "metadata": named, "roleRef": role, "subjects": [subject]},
        namespace=namespace,
    )


def granted(cluster: Cluster, namespace: str, account: str) -> set[Right]:
    """Everything that roles grant to this account of ``namespace`` by name, none by its groups."""
    every = _items(cluster, "rolebindings,clusterrolebindings")
    mine = [one for one in every if any(_is(subject, namespace, account) for subject in one.get("subjects") or [])]
    return {right for binding in mine for right in _rights(cluster, binding)}


def used(audit: AuditLog, namespace: str, account: str) -> set[Right]:
    """Everything that it asked for and was given."""
    records = audit.of(f"system:serviceaccount:{namespace}:{account}")
    return {_right(one) for one in records if "objectRef" in one and _decision(one) == "allow"}


def refused(audit: AuditLog, namespace: str, account: str) -> set[Right]:
    """Everything that it asked for and may not do."""
    records = audit.of(f"system:serviceaccount:{namespace}:{account}")
    return {_right(one) for one in records if "objectRef" in one and _decision(one) == "forbid"}


def unused(grants: set[Right], uses: set[Right]) -> set[Right]:
    """What was granted and never needed, wherever that is."""
    needed = uses | {one._replace(namespace="") for one in uses}
    return grants - needed


def _may(cluster: Cluster, namespace: str, account: str, rules: Sequence[Json]) -> bool:
    """Whether the API server goes by the rules already, which it learns of a moment after they are written."""
    rule = next(rule for rule in rules if "resourceNames" not in rule)
    resource, _, subresource = rule["resources"][0].partition("/")
    asked = {
        "namespace": namespace,
        "group": rule["apiGroups"][0],
        "resource": resource,
        "subresource": subresource,
        "verb": rule["verbs"][0],
    }
    user = f"system:serviceaccount:{namespace}:{account}"
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "resourceAttributes": asked},
    }
    options = ("--validate=false", "-f", "-", "-o", "json")
    found = json.loads(cluster.kubectl("create", *options, text=json.dumps(review)))
    return bool(found["status"]["allowed"])


def _items(cluster: Cluster, kinds: str) -> list[Json]:
    found: list[Json] = cluster.get(kinds, "--all-namespaces")["items"]
    return found


def _is(subject: Json, namespace: str, account: str) -> bool:
    return (subject["kind"], subject.get("namespace"), subject["name"]) == ("ServiceAccount", namespace, account)


def _rights(cluster: Cluster, binding: Json) -> list[Right]:
    namespace = binding["metadata"].get("namespace", "")
    of_role = namespace if binding["roleRef"]["kind"] == "Role" else "default"
    role = cluster.get(binding["roleRef"]["kind"].lower(), binding["roleRef"]["name"], namespace=of_role)
    return [
        Right(verb, group, resource, namespace)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    ]


def _right(record: Json) -> Right:
    asked = record["objectRef"]
    resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
    return Right(record["verb"], asked.get("apiGroup", ""), resource, asked.get("namespace", ""))


def _decision(record: Json) -> str:
    return str((record.get("annotations") or {}).get("authorization.k8s.io/decision", ""))
