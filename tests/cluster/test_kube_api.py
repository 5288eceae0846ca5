"""What everybody's unit tests take for granted of an API server, asked of the fake one and of a real one.

| asked | answered |
|---|---|
| create, get, list, replace, patch, delete | as `tiphys.kube` promises |
| an old version, another uid, a failed test of a patch | refused, and nothing is changed |
| the status of a kind that keeps it apart | is changed by nobody else, and changes nothing else |
| a watch | every change that the selector lets through, in order; 410 for what is forgotten |
| a Lease | is held by one, and given up |
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cluster.client import Cluster
from support.servers import kube_server

from tiphys.errors import ConflictError, ForbiddenError, NotFoundError, ObjectExistsError, StoreError, UsageError
from tiphys.kube import (
    KubeApi,
    LeaderElector,
    ListSnapshot,
    Object,
    PatchType,
    WatchEvent,
    connect_to_cluster,
    identify_cluster,
    watch_objects,
)
from tiphys.kube.api import METADATA_ONLY, ExpiredError
from tiphys.kube.resources import (
    CONFIG_MAPS,
    GPU_LEDGERS,
    LEASES,
    NAMESPACES,
    SECRETS,
    SELF_SUBJECT_ACCESS_REVIEWS,
    SERVICE_ACCOUNTS,
    TOKEN_REVIEWS,
    Resource,
)

LEDGER_KIND = Path(__file__).parents[2] / "charts" / "tiphys" / "crds" / "gpuledger.yaml"
UNKNOWN = Resource("unknown.tiphys.dev", "v1", "things", "Thing")
_FINALIZER = "tiphys.dev/test"
_QUEUES = {"queues": [{"name": "research", "gpus": {"*": 8}}]}


@dataclass(frozen=True)
class Server:
    api: KubeApi
    token: Callable[[], str]
    """A token of the service account ``default``, which has no rights."""
    as_account: Callable[[str], KubeApi]
    """Whom such a token makes."""
    forget: Callable[[], None]
    """Afterwards the first version is no longer known."""


@pytest.fixture(scope="module", params=["fake", "real"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    begin = _fake if request.param == "fake" else _real
    yield from begin(request)


def _fake(request: pytest.FixtureRequest) -> Iterator[Server]:
    account = "system:serviceaccount:ml:default"
    with kube_server.serving() as running:
        running.tokens["secret"] = account
        running.unknown.add(UNKNOWN.plural)
        running.authorize = lambda asked: asked.user != account
        yield Server(
            running.api("ml"), lambda: "secret", lambda token: running.api("ml", token=token), lambda: running.compact()
        )


def _real(request: pytest.FixtureRequest) -> Iterator[Server]:
    cluster: Cluster = request.getfixturevalue("cluster")
    cluster.kubectl("apply", "--server-side", "-f", str(LEDGER_KIND))
    cluster.established("gpuledgers.tiphys.dev")
    api = connect_to_cluster(cluster.kubeconfig)
    name = api.create(NAMESPACES, None, {"metadata": {"generateName": "test-kube-api-"}})["metadata"]["name"]
    api.namespace = name
    for resource, awaited in ((SERVICE_ACCOUNTS, "default"), (CONFIG_MAPS, "kube-root-ca.crt")):
        cluster.wait(f"{name} has {awaited}", lambda one=resource, it=awaited: api.get(one, name, it))

    def token() -> str:
        return cluster.kubectl("create", "token", "default", "--namespace", name).strip()

    def as_account(token: str) -> KubeApi:
        # The server's certificate is not what is tried here; the connections of `api` trust it.
        return KubeApi(api.server, api._transport._pool, name, lambda: f"Bearer {token}")

    cluster.wait("the new kind can be watched", lambda: _can_be_watched(api))
    # It knows no version of a kind from before that kind was made; of its own kinds it may still know the very first.
    yield Server(api, token, as_account, lambda: None)
    api.delete(NAMESPACES, None, name)
    api.close()


def _can_be_watched(api: KubeApi) -> bool:
    """False while the server fills its cache of the kind: it refuses every watch until then."""
    version = api.list(GPU_LEDGERS, api.namespace).resource_version
    try:
        list(api.watch(GPU_LEDGERS, api.namespace, version, timeout_seconds=1))
    except StoreError:
        return False
    return True


@pytest.fixture
def api(server: Server) -> KubeApi:
    return server.api


@pytest.fixture
def name(request: pytest.FixtureRequest, counter: Iterator[int] = itertools.count()) -> str:  # noqa: B008
    """Of the objects of one test, which share a namespace with those of the others."""
    return f"object-{next(counter)}"


def create(api: KubeApi, name: str, resource: Resource = CONFIG_MAPS, **fields: object) -> Object:
    return api.create(resource, api.namespace, {"metadata": {"name": name}, **fields})


def test_an_object_is_created_read_and_deleted(api: KubeApi, name: str) -> None:
    made = create(api, name, data={"a": "1"})
    assert {"uid", "resourceVersion", "creationTimestamp", "namespace"} <= set(made["metadata"])
    assert api.get(CONFIG_MAPS, api.namespace, name) == made
    with pytest.raises(ObjectExistsError, match="already exists"):
        create(api, name)
    assert api.delete(CONFIG_MAPS, api.namespace, name)
    assert not api.delete(CONFIG_MAPS, api.namespace, name)
    assert api.get(CONFIG_MAPS, api.namespace, name) is None
    with pytest.raises(NotFoundError, match=f'configmaps "{name}" not found'):
        api.replace(CONFIG_MAPS, api.namespace, made)


def test_only_the_metadata_of_an_existing_secret_is_read(api: KubeApi, name: str) -> None:
    assert not api.exists(SECRETS, api.namespace, name)
    create(api, name, SECRETS, stringData={"password": "hidden"})
    assert api.exists(SECRETS, api.namespace, name)
    path = SECRETS.object_path(api.namespace, name)
    answered = api._transport.request_json("GET", path, accept=METADATA_ONLY)
    assert set(answered) == {"apiVersion", "kind", "metadata"}
    assert (answered["kind"], answered["metadata"]["name"]) == ("PartialObjectMetadata", name)


def test_names_are_made_where_only_their_beginning_is_given(api: KubeApi, name: str) -> None:
    body = {"metadata": {"generateName": f"{name}-"}}
    names = {api.create(CONFIG_MAPS, api.namespace, body)["metadata"]["name"] for _ in range(3)}
    assert len(names) == 3
    assert all(made.startswith(f"{name}-") and len(made) == len(name) + 6 for made in names)
    with pytest.raises(UsageError, match="name or generateName is required"):
        api.create(CONFIG_MAPS, api.namespace, {"metadata": {}})


def test_a_kind_that_is_not_known_is_not_found(api: KubeApi, name: str) -> None:
    with pytest.raises(NotFoundError, match=r"does not serve /apis/.*things.* install its CustomResourceDefinition"):
        api.list(UNKNOWN, api.namespace)
    assert api.get(UNKNOWN, api.namespace, name) is None


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("app=a", ["1"]),
        ("app==a,batch=x", ["1"]),
        ("app!=a", ["2", "3"]),
        ("app in (a, b)", ["1", "2"]),
        ("app notin (a)", ["2", "3"]),
        ("app", ["1", "2"]),
        ("!app", ["3"]),
        ("app in (a,b),batch=x,!other", ["1", "2"]),
    ],
)
def test_a_list_holds_what_its_selector_lets_through(api: KubeApi, name: str, selector: str, found: list[str]) -> None:
    for number, labels in {"1": {"app": "a"}, "2": {"app": "b"}, "3": {}}.items():
        metadata = {"name": f"{name}-{number}", "labels": {**labels, "batch": "x", "test": name}}
        api.create(CONFIG_MAPS, api.namespace, {"metadata": metadata})
    items = api.list(CONFIG_MAPS, api.namespace, labels=f"test={name},{selector}").items
    assert [one["metadata"]["name"].removeprefix(f"{name}-") for one in items] == found
    assert {(one["kind"], one["apiVersion"]) for one in items} == {("ConfigMap", "v1")}


def test_fields_of_metadata_select_and_others_of_a_custom_kind_do_not(api: KubeApi, name: str) -> None:
    create(api, name, GPU_LEDGERS, spec=_QUEUES)
    for fields in (f"metadata.name={name}", f"metadata.name={name},metadata.namespace={api.namespace}"):
        assert [one["spec"] for one in api.list(GPU_LEDGERS, None, fields=fields).items] == [_QUEUES]
    with pytest.raises(UsageError, match="field label not supported"):
        api.list(GPU_LEDGERS, api.namespace, fields="spec.queues=none")


def test_a_long_list_comes_in_pages(api: KubeApi, name: str) -> None:
    for number in range(5):
        api.create(CONFIG_MAPS, api.namespace, {"metadata": {"name": f"{name}-{number}", "labels": {"test": name}}})
    items = api.list(CONFIG_MAPS, api.namespace, labels=f"test={name}", limit=2).items
    assert [one["metadata"]["name"] for one in items] == [f"{name}-{number}" for number in range(5)]


def test_an_old_version_is_not_written_over(api: KubeApi, name: str) -> None:
    first = create(api, name, data={"a": "1"})
    second = api.replace(CONFIG_MAPS, api.namespace, {**first, "data": {"a": "2"}})
    with pytest.raises(ConflictError, match="the object has been modified"):
        api.replace(CONFIG_MAPS, api.namespace, {**first, "data": {"a": "3"}})
    stale = {"metadata": {"resourceVersion": first["metadata"]["resourceVersion"]}, "data": {"a": "3"}}
    with pytest.raises(ConflictError, match="the object has been modified"):
        api.patch(CONFIG_MAPS, api.namespace, name, stale)
    assert api.get(CONFIG_MAPS, api.namespace, name) == second


def test_a_write_without_version_wins_except_over_a_custom_object(api: KubeApi, name: str) -> None:
    create(api, name, data={"a": "1"})
    written = api.replace(CONFIG_MAPS, api.namespace, {"metadata": {"name": name}, "data": {"a": "2"}})
    assert written["data"] == {"a": "2"}
    create(api, name, GPU_LEDGERS, spec=_QUEUES)
    with pytest.raises(UsageError, match=r"metadata\.resourceVersion"):
        api.replace(GPU_LEDGERS, api.namespace, {"metadata": {"name": name}, "spec": {"queues": []}})


def test_a_write_that_changes_nothing_makes_no_version(api: KubeApi, name: str) -> None:
    made = create(api, name, data={"a": "1"})
    assert _version(api.replace(CONFIG_MAPS, api.namespace, made)) == _version(made)
    assert _version(api.patch(CONFIG_MAPS, api.namespace, name, {"data": {"a": "1"}})) == _version(made)


def test_a_field_that_the_server_owns_cannot_be_changed(api: KubeApi, name: str) -> None:
    made = create(api, name)
    changed = {"creationTimestamp": "2001-01-01T00:00:00Z", "labels": {"a": "b"}}
    patched = api.patch(CONFIG_MAPS, api.namespace, name, {"metadata": changed})
    assert patched["metadata"]["labels"] == {"a": "b"}
    assert patched["metadata"]["creationTimestamp"] == made["metadata"]["creationTimestamp"]
    with pytest.raises(ConflictError, match=r"(?i)precondition"):
        api.replace(CONFIG_MAPS, api.namespace, {"metadata": {"name": name, "uid": "of another"}})


def test_a_merge_patch_sets_and_removes(api: KubeApi, name: str) -> None:
    create(api, name, data={"a": "1", "b": "2"})
    assert api.patch(CONFIG_MAPS, api.namespace, name, {"data": {"a": None, "c": "3"}})["data"] == {"b": "2", "c": "3"}


def test_a_json_patch_applies_as_a_whole_or_not_at_all(api: KubeApi, name: str) -> None:
    metadata = {"name": name, "annotations": {"a/b": "1"}}
    before = api.create(CONFIG_MAPS, api.namespace, {"metadata": metadata, "data": {"c": "2"}})
    add = {"op": "add", "path": "/data/d", "value": "3"}
    for wrong in (
        {"op": "test", "path": "/data/c", "value": "other"},
        {"op": "remove", "path": "/data/missing"},
        {"op": "add", "path": "/missing/e", "value": "4"},
    ):
        with pytest.raises(UsageError):
            api.patch(CONFIG_MAPS, api.namespace, name, [add, wrong], PatchType.JSON)
    assert api.get(CONFIG_MAPS, api.namespace, name) == before
    right: list[Object] = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": _version(before)},
        {"op": "replace", "path": "/metadata/annotations/a~1b", "value": "5"},
        {"op": "replace", "path": "/data/e", "value": "4"},  # RFC 6902 would refuse it, Kubernetes adds it
        {"op": "remove", "path": "/data/c"},
        add,
    ]
    after = api.patch(CONFIG_MAPS, api.namespace, name, right, PatchType.JSON)
    assert (after["data"], after["metadata"]["annotations"]) == ({"d": "3", "e": "4"}, {"a/b": "5"})


def test_only_the_object_that_is_meant_is_deleted(api: KubeApi, name: str) -> None:
    made = create(api, name)
    with pytest.raises(ConflictError, match=r"(?i)precondition.*uid"):
        api.delete(CONFIG_MAPS, api.namespace, name, uid="of its predecessor")
    assert api.delete(CONFIG_MAPS, api.namespace, name, uid=made["metadata"]["uid"])


def test_a_finalizer_keeps_what_is_deleted_until_it_is_gone(api: KubeApi, name: str) -> None:
    made = api.create(CONFIG_MAPS, api.namespace, {"metadata": {"name": name, "finalizers": [_FINALIZER]}})
    assert api.delete(CONFIG_MAPS, api.namespace, name)
    marked = api.get(CONFIG_MAPS, api.namespace, name)
    assert marked is not None
    assert marked["metadata"]["deletionTimestamp"]
    assert api.delete(CONFIG_MAPS, api.namespace, name)
    assert api.get(CONFIG_MAPS, api.namespace, name) == marked
    events = api.watch(CONFIG_MAPS, api.namespace, _version(made), fields=f"metadata.name={name}", timeout_seconds=60)
    api.patch(CONFIG_MAPS, api.namespace, name, {"metadata": {"finalizers": []}})
    assert api.get(CONFIG_MAPS, api.namespace, name) is None
    with closing(events):
        assert [next(events)["type"], next(events)["type"]] == ["MODIFIED", "DELETED"]


def test_a_status_is_kept_apart(api: KubeApi, name: str) -> None:
    made = create(api, name, GPU_LEDGERS, spec=_QUEUES, status={"leases": []})
    assert "status" not in made
    assert made["metadata"]["generation"] == 1
    with_status = api.replace(GPU_LEDGERS, api.namespace, {**made, "spec": {"queues": []}, "status": {}}, "status")
    assert (with_status["spec"], with_status["status"]) == (_QUEUES, {})
    assert with_status["metadata"]["generation"] == 1
    both = {"spec": {"queues": []}, "status": {"summary": {"gpus": 7}}}
    with_spec = api.patch(GPU_LEDGERS, api.namespace, name, both)
    assert (with_spec["spec"], with_spec["status"]) == ({"queues": []}, {})
    assert with_spec["metadata"]["generation"] == 2
    with pytest.raises(ConflictError):
        api.replace(GPU_LEDGERS, api.namespace, {**with_status, "status": {"summary": {}}}, "status")
    with pytest.raises(NotFoundError):
        api.replace(CONFIG_MAPS, api.namespace, create(api, name), "status")


def test_a_watch_tells_every_change_that_its_selector_lets_through(api: KubeApi, name: str) -> None:
    version = api.list(CONFIG_MAPS, api.namespace).resource_version
    seen, unseen = {"test": name, "app": "seen"}, {"test": name, "app": "unseen"}
    api.create(CONFIG_MAPS, api.namespace, {"metadata": {"name": name, "labels": unseen}})
    api.create(CONFIG_MAPS, api.namespace, {"metadata": {"name": f"{name}-other", "labels": unseen}})
    api.patch(CONFIG_MAPS, api.namespace, name, {"metadata": {"labels": seen}})
    api.patch(CONFIG_MAPS, api.namespace, name, {"data": {"a": "1"}})
    api.patch(CONFIG_MAPS, api.namespace, name, {"metadata": {"labels": unseen}})
    back = api.patch(CONFIG_MAPS, api.namespace, name, {"metadata": {"labels": seen}})
    api.delete(CONFIG_MAPS, api.namespace, name)
    with closing(api.watch(CONFIG_MAPS, api.namespace, version, labels=f"test={name},app=seen")) as events:
        changes = list(itertools.islice((one for one in events if one["type"] != "BOOKMARK"), 5))
    assert [one["type"] for one in changes] == ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]
    versions = [int(_version(one["object"])) for one in changes]
    assert versions == sorted(set(versions))
    assert versions[3] == int(_version(back))
    assert {one["object"]["kind"] for one in changes} == {"ConfigMap"}


def test_a_watch_ends_when_its_time_is_over(api: KubeApi) -> None:
    version = api.list(CONFIG_MAPS, api.namespace).resource_version
    changes = list(api.watch(CONFIG_MAPS, api.namespace, version, fields="metadata.name=none", timeout_seconds=1))
    assert {one["type"] for one in changes} <= {"BOOKMARK"}


def test_a_version_that_is_forgotten_has_expired(server: Server) -> None:
    server.forget()
    with pytest.raises(ExpiredError):
        list(server.api.watch(GPU_LEDGERS, server.api.namespace, "1", timeout_seconds=60))


def test_changes_begin_with_all_there_is(api: KubeApi, name: str) -> None:
    create(api, name)
    follow = watch_objects(api, CONFIG_MAPS, api.namespace, fields=f"metadata.name={name}", sleep=lambda _: None)
    with closing(follow) as events:
        first = next(events)
        assert isinstance(first, ListSnapshot)
        assert [one["metadata"]["name"] for one in first.objects] == [name]
        api.delete(CONFIG_MAPS, api.namespace, name)
        last = next(events)
        assert isinstance(last, WatchEvent)
        assert (last.type, last.object["kind"]) == ("DELETED", "ConfigMap")


def test_a_token_is_reviewed(server: Server) -> None:
    review = server.api.create(TOKEN_REVIEWS, None, {"spec": {"token": server.token()}})["status"]
    assert review["authenticated"] is True
    assert review["user"]["username"] == f"system:serviceaccount:{server.api.namespace}:default"
    assert f"system:serviceaccounts:{server.api.namespace}" in review["user"]["groups"]
    wrong = server.api.create(TOKEN_REVIEWS, None, {"spec": {"token": "made up"}})["status"]
    assert not wrong.get("authenticated")
    assert wrong["error"]


def test_an_account_without_rights_is_forbidden_and_can_review_its_access(server: Server) -> None:
    nobody = server.as_account(server.token())
    with pytest.raises(ForbiddenError, match='cannot list resource "configmaps"'):
        nobody.list(CONFIG_MAPS, nobody.namespace)
    asked = {"resourceAttributes": {"verb": "list", "resource": "configmaps", "namespace": nobody.namespace}}
    review = {"spec": asked}
    assert server.api.create(SELF_SUBJECT_ACCESS_REVIEWS, None, review)["status"]["allowed"] is True


def test_a_cluster_has_a_name(api: KubeApi) -> None:
    assert identify_cluster(api).startswith("kubernetes:")


def test_a_lease_is_held_by_one_taken_over_and_given_up(api: KubeApi, name: str) -> None:
    seconds, moments = [0.0], itertools.count()

    def candidate(identity: str) -> LeaderElector:
        return LeaderElector(
            api,
            api.namespace,
            name,
            identity,
            monotonic=lambda: seconds[0],
            now=lambda: datetime(2030, 1, 1, microsecond=next(moments), tzinfo=UTC),
            renew_seconds=0.01,
        )

    one, two = candidate("one"), candidate("two")
    assert [
        one.try_acquire_or_renew(),
        two.try_acquire_or_renew(),
        one.try_acquire_or_renew(),
        two.try_acquire_or_renew(),
    ] == [True, False, True, False]
    seconds[0] += 15
    assert [one.is_leader, two.try_acquire_or_renew(), one.try_acquire_or_renew()] == [False, True, False]
    stop = threading.Event()
    two.run(stop, lambda _: stop.set())
    spec = (api.get(LEASES, api.namespace, name) or {})["spec"]
    assert (spec.get("holderIdentity") or "", spec["leaseTransitions"]) == ("", 1)
    assert one.try_acquire_or_renew()


def _version(found: Object) -> str:
    return str(found["metadata"]["resourceVersion"])
