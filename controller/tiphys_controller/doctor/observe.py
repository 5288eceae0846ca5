"""Reads from the API server what the checks look at. What may not be read becomes `Unknown`; nothing is written."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import TypeVar

import yaml

from tiphys.errors import ForbiddenError, NotFoundError, StoreError
from tiphys.kube import KubeApi, Object, Resource
from tiphys.kube.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    LEASES,
    NAMESPACES,
    PODS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SUBJECT_ACCESS_REVIEWS,
)
from tiphys_controller.doctor.checks_namespace import (
    AGENT_RIGHTS,
    EXECUTOR_RIGHTS,
    GANG_RIGHTS,
    PLUGIN_ACCOUNT,
    PLUGIN_CONFIG,
    STORE_SECRET,
    TOKEN_SUFFIX,
    WORKFLOW_ACCOUNT,
)
from tiphys_controller.doctor.observed import (
    Clock,
    Deployments,
    Observed,
    PodSeen,
    Right,
    Unknown,
    WorkflowNamespace,
    is_argo_controller,
)
from tiphys_controller.doctor.pod_readiness import complaints, is_ready, readiness_path, runs, said, trouble

_TIPHYS = "app.kubernetes.io/name=tiphys"
_ARGO_CONFIG = "workflow-controller-configmap"
_NODE_LEASES = "kube-node-lease"
_LIKELY = ("argo", "tiphys", "tiphys-system")
"""Where to look for Deployments, if not everywhere may be looked."""
_AT_ONCE = 8

SeenT = TypeVar("SeenT")


def observe(api: KubeApi, namespaces: Sequence[str] = ()) -> Observed:
    """Look at a cluster.

    Args:
        api: The API server; its ``namespace`` is looked at if no other is named or found.
        namespaces: Namespaces of workflows; none: those that hold the account of workflows.

    Raises:
        StoreError: the API server does not answer.
    """
    version = _seen(lambda: str(api.get_path("/version").get("gitVersion", "")))
    argo = _deployments(api, (*_LIKELY, api.namespace, *namespaces), is_argo_controller)
    tiphys = _deployments(api, (*_LIKELY, api.namespace, *namespaces), lambda _: True, _TIPHYS)
    wanted = namespaces or _namespaces_of_workflows(api)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = tuple(pool.map(partial(_namespace, api), wanted))
    return Observed(
        server=api.server,
        version=version,
        argo_kinds=_kinds(api, "argoproj.io"),
        tiphys_kinds=_kinds(api, "tiphys.dev"),
        argo=argo,
        argo_settings=_argo_settings(api, argo),
        tiphys=tiphys,
        pods=_pods(api, tiphys),
        namespaces=found,
        clocks=_seen(lambda: tuple(clocks_of(api.list(LEASES, _NODE_LEASES).items))),
    )


def clocks_of(leases: Iterable[Object]) -> Iterable[Clock]:
    """Clocks of nodes by their Leases: a kubelet writes its own time, and the server notes when it was written."""
    for lease in leases:
        renewed = (lease.get("spec") or {}).get("renewTime")
        written = max((one.get("time", "") for one in lease["metadata"].get("managedFields") or []), default="")
        if renewed and written:
            ahead = datetime.fromisoformat(renewed) - datetime.fromisoformat(written)
            yield Clock(lease["metadata"]["name"], ahead.total_seconds())


def settings_of(config_map: Object) -> Mapping[str, str]:
    """The top level of Argo's ConfigMap, whose settings may also stand together under the key ``config``."""
    data: dict[str, str] = dict(config_map.get("data") or {})
    try:
        inner = yaml.safe_load(data.pop("config", "")) or {}
    except yaml.YAMLError:
        inner = {}
    known = {name: _text(value) for name, value in inner.items()} if isinstance(inner, dict) else {}
    return {**known, **data}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _seen(read: Callable[[], SeenT]) -> SeenT | Unknown:
    try:
        return read()
    except (ForbiddenError, NotFoundError) as error:
        return Unknown(str(error))


def _kinds(api: KubeApi, group: str) -> frozenset[str] | Unknown:
    try:
        listed = api.get_path(f"/apis/{group}/v1alpha1").get("resources") or []
    except NotFoundError:
        return frozenset()
    except ForbiddenError as error:
        return Unknown(str(error))
    return frozenset(str(one["name"]) for one in listed)


def _deployments(
    api: KubeApi, likely: Iterable[str], wanted: Callable[[Object], bool], labels: str = ""
) -> Deployments:
    try:
        return Deployments(tuple(one for one in api.list(DEPLOYMENTS, None, labels).items if wanted(one)))
    except ForbiddenError as error:
        found: list[Object] = []
        for namespace in dict.fromkeys(likely):
            listed = _seen(partial(_list, api, DEPLOYMENTS, namespace, labels))
            found += [] if isinstance(listed, Unknown) else [one for one in listed if wanted(one)]
        return Deployments(tuple(found), str(error))


def _argo_settings(api: KubeApi, argo: Deployments) -> Mapping[str, str] | Unknown:
    if not argo.found:
        return Unknown(argo.unseen or "no Deployment runs Argo's workflow-controller")
    namespace = argo.found[0]["metadata"]["namespace"]
    found = _seen(lambda: api.get(CONFIG_MAPS, namespace, _ARGO_CONFIG))
    return found if isinstance(found, Unknown) else settings_of(found or {})


def _pods(api: KubeApi, tiphys: Deployments) -> tuple[PodSeen, ...] | Unknown:
    found: list[PodSeen] = []
    for namespace in sorted({one["metadata"]["namespace"] for one in tiphys.found}):
        listed = _seen(partial(_list, api, PODS, namespace, _TIPHYS))
        if isinstance(listed, Unknown):
            return listed
        found += [_pod(api, pod) for pod in listed]
    return tuple(found)


def _pod(api: KubeApi, pod: Object) -> PodSeen:
    metadata = pod["metadata"]
    component = (metadata.get("labels") or {}).get("app.kubernetes.io/component", "")
    status, body = _asked(api, pod) if runs(pod) else (0, "")
    seen = PodSeen(str(component), metadata["namespace"], metadata["name"])
    if is_ready(pod):
        return seen._replace(complaints=complaints(body) if status == 200 else ())
    return seen._replace(trouble=(said(body) if status == 503 else "") or trouble(pod))


def _asked(api: KubeApi, pod: Object) -> tuple[int, str]:
    """What the process itself says, with its status; 0 where it cannot be asked."""
    try:
        return api.get_text(readiness_path(pod))
    except StoreError:
        return 0, ""


def _namespaces_of_workflows(api: KubeApi) -> Sequence[str]:
    listed = _seen(lambda: api.list(SERVICE_ACCOUNTS, None, fields=f"metadata.name={WORKFLOW_ACCOUNT}").items)
    found = [] if isinstance(listed, Unknown) else [one["metadata"]["namespace"] for one in listed]
    return sorted(set(found)) or [api.namespace]


def _namespace(api: KubeApi, name: str) -> WorkflowNamespace:
    def names(resource: Resource, wanted: Iterable[str]) -> frozenset[str]:
        return frozenset(one for one in wanted if api.get(resource, name, one) is not None)

    secrets = (STORE_SECRET, WORKFLOW_ACCOUNT + TOKEN_SUFFIX, PLUGIN_ACCOUNT + TOKEN_SUFFIX)
    return WorkflowNamespace(
        name=name,
        exists=_seen(lambda: api.get(NAMESPACES, None, name) is not None),
        accounts=_seen(lambda: names(SERVICE_ACCOUNTS, (WORKFLOW_ACCOUNT, PLUGIN_ACCOUNT))),
        config_maps=_seen(lambda: names(CONFIG_MAPS, (PLUGIN_CONFIG,))),
        secrets={one: _seen(partial(_keys, api, name, one)) for one in secrets},
        rights=_seen(
            lambda: {right: _may(api, name, right) for right in (*EXECUTOR_RIGHTS, *AGENT_RIGHTS, *GANG_RIGHTS)}
        ),
    )


_RIGHTS = (*EXECUTOR_RIGHTS, *AGENT_RIGHTS, *GANG_RIGHTS)


def _keys(api: KubeApi, namespace: str, secret: str) -> frozenset[str]:
    """Names of the keys; the values are let go at once."""
    found = api.get(SECRETS, namespace, secret)
    return frozenset((found or {}).get("data") or {}) if found else frozenset()


def _may(api: KubeApi, namespace: str, right: Right) -> bool:
    resource, _, subresource = right.resource.partition("/")
    asked = {
        "namespace": namespace,
        "verb": right.verb,
        "group": right.group,
        "resource": resource,
        "subresource": subresource,
    }
    review = {"spec": {"user": f"system:serviceaccount:{namespace}:{WORKFLOW_ACCOUNT}", "resourceAttributes": asked}}
    return bool((api.create(SUBJECT_ACCESS_REVIEWS, None, review).get("status") or {}).get("allowed"))


def _list(api: KubeApi, resource: Resource, namespace: str, labels: str) -> list[Object]:
    return api.list(resource, namespace, labels).items
