"""Reads from the API server what the checks need, and writes nothing there.

A request that the account may not make yields an `UnknownValue`. The credentials
that a workflow namespace holds are tried out in the store, see
`tiphys_controller.doctor.store_credentials`.
"""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import TypeVar

import yaml

from tiphys.errors import ForbiddenError, IntegrityError, NotFoundError, StoreError, TiphysError
from tiphys.kube import KubeApi, Object, Resource
from tiphys.kube.ledger_log import LogDamagedError
from tiphys.kube.resources import (
    CONFIG_MAPS,
    DEFAULT_LEDGER_NAME,
    DEPLOYMENTS,
    KUEUE_LOCAL_QUEUES,
    LEASES,
    NAMESPACES,
    NODE_LEASE_NAMESPACE,
    PODS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SUBJECT_ACCESS_REVIEWS,
)
from tiphys.kube.whole_ledger import WholeLedgerReader
from tiphys.protocol.step_spec import STORE_SECRET
from tiphys.records import utc_now
from tiphys.service.yaml_documents import UNREADABLE_YAML
from tiphys.store import is_bucket_url
from tiphys.store.open import PLACEHOLDER
from tiphys_controller.doctor.artifact_repository import ARTIFACT_CONFIG_MAP
from tiphys_controller.doctor.check import Finding, UnknownValue
from tiphys_controller.doctor.checks_namespace import (
    PERMISSIONS,
    PLUGIN_ACCOUNT,
    PLUGIN_CONFIG,
    TOKEN_SUFFIX,
    WORKFLOW_ACCOUNT,
)
from tiphys_controller.doctor.observed import (
    CLEAR_ANSWERS,
    FAIL_PODS,
    LIST_NODE_LEASES,
    ArtifactSettings,
    ClusterObservation,
    DeploymentSearch,
    KueueObservation,
    NodeClock,
    Permission,
    PodReadiness,
    UnreadSecret,
    WorkflowNamespace,
    find_account,
    find_served_store,
    is_argo_controller,
    is_kueue_ledger,
    read_component_label,
)
from tiphys_controller.doctor.obstacles import Obstacle, distinct_obstacles, observe_obstacles
from tiphys_controller.doctor.pod_readiness import (
    build_readiness_path,
    describe_not_ready,
    has_running_container,
    is_pod_ready,
    parse_ledger_failure,
    parse_partial_failures,
    parse_readiness_reason,
)
from tiphys_controller.doctor.store_credentials import probe_program_credentials

_TIPHYS_LABELS = "app.kubernetes.io/name=tiphys"
_ARGO_CONFIG_MAP = "workflow-controller-configmap"
_LIKELY_NAMESPACES = ("argo", "tiphys", "tiphys-system")
"""Namespaces to search for Deployments if the account may not list all namespaces."""
_PARALLEL_READS = 8

ValueT = TypeVar("ValueT")


def observe_cluster(
    api: KubeApi, namespaces: Sequence[str] = (), *, opens_secrets: bool = True, reads_workflows: bool = True
) -> ClusterObservation:
    """Observe a cluster.

    Args:
        api: The API server; its ``namespace`` is checked if no other is named or found.
        namespaces: Namespaces of workflows; none: those that hold the workflow account.
        opens_secrets: Whether to read the keys of Secrets, and to try out the credentials of the store. If not, the
            API server is asked only whether they exist.
        reads_workflows: Whether to look for what keeps Workflows from going on.

    Raises:
        StoreError: the API server does not answer.
    """
    version = _read_or_unknown(lambda: str(api.get_path("/version").get("gitVersion", "")))
    argo = _deployments(api, (*_LIKELY_NAMESPACES, api.namespace, *namespaces), is_argo_controller)
    tiphys = _deployments(api, (*_LIKELY_NAMESPACES, api.namespace, *namespaces), lambda _: True, _TIPHYS_LABELS)
    workflow_namespaces = namespaces or _namespaces_of_workflows(api)
    with ThreadPoolExecutor(_PARALLEL_READS) as pool:
        observed_namespaces = tuple(pool.map(partial(_namespace, api, tiphys, opens_secrets), workflow_namespaces))
    return ClusterObservation(
        server=api.server,
        version=version,
        argo_kinds=_read_kinds(api, "argoproj.io/v1alpha1"),
        tiphys_kinds=_read_kinds(api, "tiphys.dev/v1beta1"),
        argo=argo,
        argo_settings=_argo_settings(api, argo),
        tiphys=tiphys,
        pods=_pods(api, tiphys),
        namespaces=observed_namespaces,
        kueue=_kueue(api, workflow_namespaces) if is_kueue_ledger(tiphys.found) else None,
        keeps_answers=_read_or_unknown(lambda: _namespaces_that_keep_answers(api, argo, workflow_namespaces)),
        obstacles=_read_or_unknown(lambda: _obstacles(api, namespaces)) if reads_workflows else (),
        ledger_damage="" if is_kueue_ledger(tiphys.found) else _find_ledger_damage(api, tiphys),
        missing_loss_rights=_read_or_unknown(lambda: _find_missing_loss_rights(api, tiphys, workflow_namespaces)),
        clocks=_read_or_unknown(lambda: tuple(read_node_clocks(api.list(LEASES, NODE_LEASE_NAMESPACE).items))),
    )


def _obstacles(api: KubeApi, namespaces: Sequence[str]) -> tuple[Obstacle, ...]:
    now = utc_now()
    found = (obstacle for place in namespaces or (None,) for obstacle in observe_obstacles(api, place, now))
    return tuple(distinct_obstacles(found))


def read_node_clocks(leases: Iterable[Object]) -> Iterable[NodeClock]:
    """Offsets of node clocks. A kubelet writes its own time into its Lease; the server records when it did."""
    for lease in leases:
        renewed = (lease.get("spec") or {}).get("renewTime")
        written = max(
            (managed_field.get("time", "") for managed_field in lease["metadata"].get("managedFields") or []),
            default="",
        )
        if renewed and written:
            ahead = datetime.fromisoformat(renewed) - datetime.fromisoformat(written)
            yield NodeClock(lease["metadata"]["name"], ahead.total_seconds())


def parse_argo_settings(config_map: Object) -> Mapping[str, str]:
    """Settings of Argo's ConfigMap, at its top level or together under the key ``config``."""
    data: dict[str, str] = dict(config_map.get("data") or {})
    try:
        inner = yaml.safe_load(data.pop("config", "")) or {}
    except UNREADABLE_YAML:
        inner = {}
    nested = {name: _text(value) for name, value in inner.items()} if isinstance(inner, dict) else {}
    return {**nested, **data}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_or_unknown(read: Callable[[], ValueT]) -> ValueT | UnknownValue:
    try:
        return read()
    except (ForbiddenError, NotFoundError) as error:
        return UnknownValue(str(error))


def _find_ledger_damage(api: KubeApi, tiphys: DeploymentSearch) -> str:
    """What a new reader of the ledger misses; the services, which follow its log, may not need it."""
    for namespace in sorted({deployment["metadata"]["namespace"] for deployment in tiphys.found}):
        try:
            _read_or_unknown(WholeLedgerReader(api, namespace, DEFAULT_LEDGER_NAME).read)
        except (LogDamagedError, IntegrityError) as error:
            return str(error)
    return ""


def _kueue(api: KubeApi, namespaces: Sequence[str]) -> KueueObservation | UnknownValue:
    kinds = _read_kinds(api, KUEUE_LOCAL_QUEUES.api_version)
    if isinstance(kinds, UnknownValue):
        return kinds

    def names(namespace: str) -> frozenset[str]:
        found = api.list(KUEUE_LOCAL_QUEUES, namespace).items if kinds else []
        return frozenset(item["metadata"]["name"] for item in found)

    controller = _deployments(api, ("kueue-system",), lambda _: True, "app.kubernetes.io/name=kueue")
    return _read_or_unknown(lambda: KueueObservation(kinds, {place: names(place) for place in namespaces}, controller))


def _read_kinds(api: KubeApi, group_version: str) -> frozenset[str] | UnknownValue:
    try:
        listed = api.get_path(f"/apis/{group_version}").get("resources") or []
    except NotFoundError:
        return frozenset()
    except ForbiddenError as error:
        return UnknownValue(str(error))
    return frozenset(str(item["name"]) for item in listed)


def _deployments(
    api: KubeApi, fallback_namespaces: Iterable[str], is_match: Callable[[Object], bool], labels: str = ""
) -> DeploymentSearch:
    try:
        return DeploymentSearch(tuple(item for item in api.list(DEPLOYMENTS, None, labels).items if is_match(item)))
    except ForbiddenError as error:
        deployments: list[Object] = []
        for namespace in dict.fromkeys(fallback_namespaces):
            listed = _read_or_unknown(partial(_list, api, DEPLOYMENTS, namespace, labels))
            deployments += [] if isinstance(listed, UnknownValue) else [item for item in listed if is_match(item)]
        return DeploymentSearch(tuple(deployments), str(error))


def _argo_settings(api: KubeApi, argo: DeploymentSearch) -> Mapping[str, str] | UnknownValue:
    if not argo.found:
        return UnknownValue(argo.unseen_reason or "no Deployment runs Argo's workflow-controller")
    namespace = argo.found[0]["metadata"]["namespace"]
    found = _read_or_unknown(lambda: api.get(CONFIG_MAPS, namespace, _ARGO_CONFIG_MAP))
    return found if isinstance(found, UnknownValue) else parse_argo_settings(found or {})


def _pods(api: KubeApi, tiphys: DeploymentSearch) -> tuple[PodReadiness, ...] | UnknownValue:
    pods: list[PodReadiness] = []
    for namespace in sorted({deployment["metadata"]["namespace"] for deployment in tiphys.found}):
        listed = _read_or_unknown(partial(_list, api, PODS, namespace, _TIPHYS_LABELS))
        if isinstance(listed, UnknownValue):
            return listed
        pods += [_pod(api, pod) for pod in listed]
    return tuple(pods)


def _pod(api: KubeApi, pod: Object) -> PodReadiness:
    metadata = pod["metadata"]
    component = (metadata.get("labels") or {}).get("app.kubernetes.io/component", "")
    status, body = _read_readiness(api, pod) if has_running_container(pod) else (0, "")
    readiness = PodReadiness(str(component), metadata["namespace"], metadata["name"])
    if is_pod_ready(pod):
        if status != 200:
            return readiness
        return readiness._replace(
            partial_failures=parse_partial_failures(body), ledger_failure=parse_ledger_failure(body)
        )
    return readiness._replace(
        not_ready_reason=(parse_readiness_reason(body) if status == 503 else "") or describe_not_ready(pod)
    )


def _read_readiness(api: KubeApi, pod: Object) -> tuple[int, str]:
    """Status and body of the pod's ``/readyz``; status 0 if it does not answer."""
    try:
        return api.get_text(build_readiness_path(pod))
    except StoreError:
        return 0, ""


def _namespaces_of_workflows(api: KubeApi) -> Sequence[str]:
    listed = _read_or_unknown(
        lambda: api.list(SERVICE_ACCOUNTS, None, fields=f"metadata.name={WORKFLOW_ACCOUNT}").items
    )
    found = [] if isinstance(listed, UnknownValue) else [item["metadata"]["namespace"] for item in listed]
    return sorted(set(found)) or [api.namespace]


def _namespace(api: KubeApi, tiphys: DeploymentSearch, opens_secrets: bool, name: str) -> WorkflowNamespace:
    def names(resource: Resource, wanted: Iterable[str]) -> frozenset[str]:
        return frozenset(namespace for namespace in wanted if api.get(resource, name, namespace) is not None)

    accounts = (*PERMISSIONS, PLUGIN_ACCOUNT)
    read_secret = _read_secret_keys if opens_secrets else _find_secret
    secrets = (STORE_SECRET, *(account + TOKEN_SUFFIX for account in accounts))
    return WorkflowNamespace(
        name=name,
        exists=_read_or_unknown(lambda: api.get(NAMESPACES, None, name) is not None),
        accounts=_read_or_unknown(lambda: names(SERVICE_ACCOUNTS, accounts)),
        config_maps=_read_or_unknown(lambda: names(CONFIG_MAPS, (PLUGIN_CONFIG,))),
        secrets={secret: _read_or_unknown(partial(read_secret, api, name, secret)) for secret in secrets},
        permissions=_read_or_unknown(
            lambda: {
                (account, right): is_permitted(api, name, (name, account), right)
                for account, rights in PERMISSIONS.items()
                for right in rights
            }
        ),
        store_access=_try_store_credentials(api, tiphys, name) if opens_secrets else None,
        artifact_settings=_read_or_unknown(partial(_read_artifact_settings, api, tiphys, name)),
    )


def _read_artifact_settings(api: KubeApi, tiphys: DeploymentSearch, name: str) -> ArtifactSettings | None:
    served = find_served_store(tiphys.found, name)
    if served is None or not is_bucket_url(served.url):
        return None
    return ArtifactSettings(served.url.replace(PLACEHOLDER, name), api.get(CONFIG_MAPS, name, ARTIFACT_CONFIG_MAP))


def _try_store_credentials(
    api: KubeApi, tiphys: DeploymentSearch, name: str
) -> Sequence[Finding] | UnknownValue | None:
    """Try out the Secret with the credentials of the store, as a program of the namespace could."""
    secret = _read_or_unknown(lambda: api.get(SECRETS, name, STORE_SECRET))
    if secret is None or isinstance(secret, UnknownValue):
        return secret
    variables = {key: base64.b64decode(value).decode() for key, value in (secret.get("data") or {}).items()}
    served = find_served_store(tiphys.found, name)
    if served is None:
        return UnknownValue(f"no Deployment of Tiphys was found that serves {name} and so names its store")
    if not served.url.startswith("s3://"):
        return None
    if "AWS_ACCESS_KEY_ID" not in variables:
        return UnknownValue(f"Secret {STORE_SECRET} sets no AWS_ACCESS_KEY_ID")
    try:
        return probe_program_credentials(served.url, name, served.namespaces, variables)
    except TiphysError as error:
        return UnknownValue(str(error))


def _read_secret_keys(api: KubeApi, namespace: str, secret: str) -> frozenset[str]:
    """Names of the keys of a Secret; its values are discarded."""
    found = api.get(SECRETS, namespace, secret)
    return frozenset((found or {}).get("data") or {}) if found else frozenset()


def _find_secret(api: KubeApi, namespace: str, secret: str) -> frozenset[str] | UnreadSecret:
    """Whether a Secret exists; the API server sends nothing of its content."""
    return UnreadSecret() if api.exists(SECRETS, namespace, secret) else frozenset()


def _find_missing_loss_rights(api: KubeApi, tiphys: DeploymentSearch, namespaces: Sequence[str]) -> tuple[str, ...]:
    accounts = {find_account(found) for found in tiphys.found if read_component_label(found) == "plugin"}
    wanted = [(NODE_LEASE_NAMESPACE, LIST_NODE_LEASES), *((namespace, FAIL_PODS) for namespace in namespaces)]
    return tuple(
        f"{right} in {namespace}"
        for account in sorted(accounts)
        for namespace, right in wanted
        if not is_permitted(api, namespace, account, right)
    )


def _namespaces_that_keep_answers(api: KubeApi, argo: DeploymentSearch, namespaces: Sequence[str]) -> frozenset[str]:
    accounts = {find_account(deployment) for deployment in argo.found}
    return frozenset(
        namespace
        for namespace in namespaces
        if accounts and not any(is_permitted(api, namespace, account, CLEAR_ANSWERS) for account in accounts)
    )


def is_permitted(api: KubeApi, namespace: str, account: tuple[str, str], right: Permission) -> bool:
    """Whether ``account``, a namespace and a name, has a right in ``namespace``."""
    resource, _, subresource = right.resource.partition("/")
    attributes = {
        "namespace": namespace,
        "verb": right.verb,
        "group": right.group,
        "resource": resource,
        "subresource": subresource,
    }
    review = {"spec": {"user": ":".join(("system:serviceaccount", *account)), "resourceAttributes": attributes}}
    return bool((api.create(SUBJECT_ACCESS_REVIEWS, None, review).get("status") or {}).get("allowed"))


def _list(api: KubeApi, resource: Resource, namespace: str, labels: str) -> list[Object]:
    return api.list(resource, namespace, labels).items
