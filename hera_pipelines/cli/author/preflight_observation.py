"""Reads cluster and store for ``tiphys preflight``, each read on a thread of its own and all within one time limit.

Nothing is written in the cluster, and no content of a Secret is read. What does not answer in time, or may not be
read, is an `UnknownValue`.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from tiphys_controller.doctor.check import Finding, UnknownValue, failed, passed
from tiphys_controller.doctor.observe import is_permitted, observe_cluster
from tiphys_controller.doctor.observed import ClusterObservation, find_plugin_mode, find_served_store, is_kueue_ledger
from tiphys_controller.doctor.store_probe import probe_store
from tiphys_plugin.quota.queues import QueueRules

from hera_pipelines.cli.gpus.nodes import apply_cluster_nodes
from hera_pipelines.cli.gpus.queues import parse_ledger
from hera_pipelines.preflight.checks_objects import find_accounts, find_claims, find_named_objects, find_needed_rights
from hera_pipelines.preflight.observation import (
    NO_CLUSTER,
    ObservedRights,
    PreflightObservation,
    ReferencedObjects,
    SaveTimes,
)
from hera_pipelines.preflight.save_times import read_save_times
from hera_pipelines.preflight.subject import PreflightSubject
from tiphys.errors import ForbiddenError, NotFoundError, TiphysError, UsageError
from tiphys.kube.resources import (
    CONFIG_MAPS,
    DEFAULT_LEDGER_NAME,
    PERSISTENT_VOLUME_CLAIMS,
    SECRETS,
    SELF_SUBJECT_ACCESS_REVIEWS,
    SERVICE_ACCOUNTS,
    WORKFLOWS,
)
from tiphys.kube.whole_ledger import WholeLedgerReader
from tiphys.store import is_bucket_url, list_runs, open_store
from tiphys.threads import start_background_thread

if TYPE_CHECKING:
    from tiphys.kube import KubeApi, Object, Resource

ValueT = TypeVar("ValueT")

_RACES = 3
"""Fewer than `tiphys doctor` runs: a faulty server fails within the first few."""
_API_VERSION = re.compile(r"v[a-z0-9]+|[a-z0-9.-]+/v[a-z0-9]+")
_VERSION_LABEL = "app.kubernetes.io/version"
_PLUGIN_CONFIG = "tiphys-executor-plugin"


class PendingRead(Generic[ValueT]):
    """A read that goes on, on a thread that does not delay the exit of the program."""

    def __init__(self, what: str, read: Callable[[], ValueT], limit_seconds: float, ends_at: float) -> None:
        self._what, self._read, self._limit_seconds, self._ends_at = what, read, limit_seconds, ends_at
        self._value: ValueT | UnknownValue | None = None
        self._error: Exception | None = None
        self._thread = start_background_thread(self._run)

    def _run(self) -> None:
        try:
            self._value = self._read()
        except TiphysError as error:
            self._value = UnknownValue(str(error))
        except Exception as error:  # noqa: BLE001  raised again by the thread that waits
            self._error = error

    def wait(self) -> ValueT | UnknownValue:
        """The value, or why it is not known."""
        if self._thread is None:
            return UnknownValue(f"{self._what}: no thread could be started")
        if not self._thread.join(max(0.0, self._ends_at - time.monotonic())):
            return UnknownValue(f"{self._what} did not answer within {self._limit_seconds:g} s")
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value


class BoundedReads:
    """Starts reads that together have ``limit_seconds``."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._ends_at = time.monotonic() + limit_seconds

    def start(self, what: str, read: Callable[[], ValueT]) -> PendingRead[ValueT]:
        """Start a read of ``what``, the subject of the sentence if it does not answer."""
        return PendingRead(what, read, self._limit_seconds, self._ends_at)


def observe_for_preflight(
    subject: PreflightSubject,
    api: "KubeApi | None",
    unasked: str,
    queues: QueueRules | None,
    limit_seconds: float,
    *,
    tries_used_store: bool,
) -> PreflightObservation:
    """Observe what the checks of ``subject`` need.

    ``unasked`` says why there is no cluster to ask. The queues of a queue file take the place of those of the cluster.
    All reads together take ``limit_seconds``; with ``tries_used_store`` the promises of a store that holds runs are
    tried, too.
    """
    reads, url = BoundedReads(limit_seconds), subject.pipeline.store
    store = reads.start(f"store {url}", partial(_probe, url, tries_used_store)) if url else None
    saves = reads.start(f"store {url}", partial(_read_saves, subject)) if url else None
    known = PreflightObservation(unasked=unasked) if api is None else observe_cluster_for_preflight(api, subject, reads)
    if queues is not None:
        known = replace(known, queues=queues, queues_note="")
    if store is not None and saves is not None:
        known = replace(known, store=store.wait(), saves=saves.wait())
    return known


def observe_cluster_for_preflight(
    api: "KubeApi", subject: PreflightSubject, reads: BoundedReads
) -> PreflightObservation:
    """What the cluster holds, without the store."""
    server = f"the API server {api.server}"
    cluster_read = reads.start(
        server, partial(observe_cluster, api, [subject.namespace], opens_secrets=False, reads_workflows=False)
    )
    may_submit = reads.start(server, partial(_may_create_workflows, api, subject.namespace))
    objects = reads.start(server, partial(_read_objects, api, subject))
    cluster = cluster_read.wait()
    if isinstance(cluster, UnknownValue):
        return PreflightObservation(unasked=cluster.reason, cluster=cluster)
    rights = reads.start(server, partial(_read_rights, api, subject, cluster))
    queues = reads.start(server, partial(_read_queues, api, cluster, subject.namespace))
    version = reads.start(server, partial(_read_plugin_version, api, subject.namespace, cluster))
    found = queues.wait() if subject.gpu_steps and not is_kueue_ledger(cluster.tiphys.found) else NO_CLUSTER
    rules, note = (found, "") if isinstance(found, UnknownValue) else found
    return PreflightObservation(
        cluster=cluster,
        may_submit=may_submit.wait(),
        rights=rights.wait(),
        objects=objects.wait(),
        queues=rules,
        queues_note=note,
        plugin_version=version.wait(),
    )


def _probe(url: str, tries_used_store: bool) -> Sequence[Finding]:
    try:
        store = open_store(url, must_exist=True)
        if tries_used_store or not any(list_runs(store)):
            return probe_store(url, races=_RACES)
        found = passed("answers and holds runs, so its promises were not tried again")
    except NotFoundError as error:
        is_made = not is_bucket_url(url)
        found = passed("does not exist yet; the first run creates it") if is_made else failed(str(error), "")
    except TiphysError as error:
        found = failed(str(error), "")
    return [found._replace(check="reachable")]


def _read_saves(subject: PreflightSubject) -> Mapping[str, SaveTimes]:
    try:
        return read_save_times(open_store(subject.pipeline.store, must_exist=True), subject)
    except NotFoundError:
        return {}


def _may_create_workflows(api: "KubeApi", namespace: str) -> bool:
    attributes = {"namespace": namespace, "verb": "create", "group": WORKFLOWS.group, "resource": WORKFLOWS.plural}
    review = api.create(SELF_SUBJECT_ACCESS_REVIEWS, None, {"spec": {"resourceAttributes": attributes}})
    return bool((review.get("status") or {}).get("allowed"))


def _read_objects(api: "KubeApi", subject: PreflightSubject) -> ReferencedObjects:
    namespace = subject.namespace
    secrets, config_maps = find_named_objects(subject)
    return ReferencedObjects(
        secrets={name: _exists(api, SECRETS, namespace, name) for name in secrets},
        config_maps={name: _exists(api, CONFIG_MAPS, namespace, name) for name in config_maps},
        claims={name: _read_access_modes(api, namespace, name) for name in find_claims(subject)},
    )


def _exists(api: "KubeApi", resource: "Resource", namespace: str, name: str) -> bool | UnknownValue:
    try:
        return api.exists(resource, namespace, name)
    except UsageError:
        return False  # no object can have this name
    except ForbiddenError as error:
        return UnknownValue(str(error))


def _read_access_modes(api: "KubeApi", namespace: str, name: str) -> frozenset[str] | UnknownValue | None:
    try:
        claim = api.get(PERSISTENT_VOLUME_CLAIMS, namespace, name)
    except UsageError:
        return None
    except ForbiddenError as error:
        return UnknownValue(str(error))
    return None if claim is None else frozenset(map(str, (claim.get("spec") or {}).get("accessModes") or []))


def _read_rights(api: "KubeApi", subject: PreflightSubject, cluster: ClusterObservation) -> ObservedRights:
    plurals: dict[tuple[str, str], str] = {}
    missing: dict[str, str] = {}
    for step, _, created in subject.created_objects:
        plural = _find_plural(api, created.api_version, created.kind)
        if plural:
            plurals[created.api_version, created.kind] = plural
        elif plural is not None:
            missing.setdefault(f"{created.kind} ({created.api_version})", step)
    needed = find_needed_rights(subject, find_plugin_mode(cluster.tiphys.found), plurals)
    namespace = subject.namespace
    allowed = {(account, right): is_permitted(api, namespace, (namespace, account), right) for account, right in needed}
    accounts = [name for name in find_accounts(subject) if not api.exists(SERVICE_ACCOUNTS, namespace, name)]
    return ObservedRights(allowed, missing, tuple(accounts))


def _find_plural(api: "KubeApi", api_version: str, kind: str) -> str | None:
    """Plural of a kind; empty if the cluster does not have it, None if a tag decides at run time."""
    if not _API_VERSION.fullmatch(api_version) or "{{" in kind:
        return None
    root = "apis" if "/" in api_version else "api"
    try:
        listed: list[Object] = api.get_path(f"/{root}/{api_version}").get("resources") or []
    except NotFoundError:
        return ""
    except ForbiddenError:
        return None
    return next((str(item["name"]) for item in listed if item.get("kind") == kind and "/" not in item["name"]), "")


def _read_queues(
    api: "KubeApi", cluster: ClusterObservation, namespace: str
) -> "tuple[QueueRules, str] | UnknownValue":
    serving = [deployment for deployment in cluster.tiphys.found if find_served_store((deployment,), namespace)]
    homes = [deployment["metadata"]["namespace"] for deployment in serving]
    if not homes:
        unseen = cluster.tiphys.unseen_reason
        return UnknownValue(unseen or f"no Deployment of Tiphys was found that serves {namespace}")
    ledger = WholeLedgerReader(api, homes[0], DEFAULT_LEDGER_NAME).read()
    if ledger is None:
        return UnknownValue(f"there is no GPULedger {homes[0]}/{DEFAULT_LEDGER_NAME}")
    notes: list[str] = []
    state = apply_cluster_nodes(api, parse_ledger(ledger), notes.append)
    return state.queues, "; ".join(notes)


def _read_plugin_version(api: "KubeApi", namespace: str, cluster: ClusterObservation) -> str:
    try:
        found = api.get(CONFIG_MAPS, namespace, _PLUGIN_CONFIG)
    except ForbiddenError:
        found = None
    labelled = [found, *cluster.tiphys.found] if found else cluster.tiphys.found
    labels = [((item or {}).get("metadata") or {}).get("labels") or {} for item in labelled]
    return next((str(label[_VERSION_LABEL]) for label in labels if label.get(_VERSION_LABEL)), "")
