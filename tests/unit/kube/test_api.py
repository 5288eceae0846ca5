"""What each answer of the API server becomes.

| answer | here |
|---|---|
| 404 | None from get, False from delete, otherwise NotFoundError |
| 409 AlreadyExists, 409 | ObjectExistsError, ConflictError |
| 410 | ExpiredError; a list is read again, whole |
| 400, 405, 413, 415, 422 | UsageError |
| 401, 403 | ForbiddenError |
| 429, 5xx, redirects, silence, garbage | StoreError |
"""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.servers.kube_server import KubeServer, Request
from urllib3 import PoolManager

from tiphys.errors import ConflictError, ForbiddenError, NotFoundError, ObjectExistsError, StoreError, UsageError
from tiphys.kube import KubeApi, Object, PatchType, Resource
from tiphys.kube.api import ExpiredError
from tiphys.kube.resources import CONFIG_MAPS, GPU_LEDGERS, LEASES, PODS, TOKEN_REVIEWS, WORKFLOWS


def test_an_object_is_created_read_listed_and_deleted(api: KubeApi) -> None:
    made = api.create(PODS, "ml", {"metadata": {"name": "one", "labels": {"app": "train"}}})
    assert (made["kind"], made["apiVersion"], made["metadata"]["namespace"]) == ("Pod", "v1", "ml")
    assert api.get(PODS, "ml", "one") == made
    assert api.list(PODS, "ml", labels="app=train").items == [made]
    assert api.list(PODS, "ml", labels="app=other").items == []
    assert api.list(PODS, None, fields="metadata.name=one").items == [made]
    assert api.delete(PODS, "ml", "one")


def test_a_missing_object_is_none_and_cannot_be_deleted_or_written(api: KubeApi) -> None:
    assert api.get(PODS, "ml", "one") is None
    assert not api.delete(PODS, "ml", "one")
    with pytest.raises(NotFoundError, match='pods "one" not found'):
        api.replace(PODS, "ml", {"metadata": {"name": "one"}})
    with pytest.raises(NotFoundError):
        api.patch(PODS, "ml", "one", {})


def test_only_the_object_that_is_meant_is_deleted(api: KubeApi) -> None:
    made = api.create(PODS, "ml", {"metadata": {"name": "one"}})
    with pytest.raises(ConflictError, match="uid"):
        api.delete(PODS, "ml", "one", uid="of its predecessor")
    assert api.delete(PODS, "ml", "one", uid=made["metadata"]["uid"], grace_seconds=0)


def test_a_second_object_of_a_name_is_distinguished_from_a_conflict(api: KubeApi) -> None:
    api.create(PODS, "ml", {"metadata": {"name": "one"}})
    with pytest.raises(ObjectExistsError, match="already exists"):
        api.create(PODS, "ml", {"metadata": {"name": "one"}})


def test_a_write_under_an_old_version_conflicts(api: KubeApi) -> None:
    first = api.create(LEASES, "ml", {"metadata": {"name": "one"}})
    second = api.replace(LEASES, "ml", {**first, "spec": {"holderIdentity": "me"}})
    with pytest.raises(ConflictError):
        api.replace(LEASES, "ml", {**first, "spec": {}})
    stale = {"metadata": {"resourceVersion": first["metadata"]["resourceVersion"]}, "spec": {}}
    with pytest.raises(ConflictError):
        api.patch(LEASES, "ml", "one", stale)
    assert api.get(LEASES, "ml", "one") == second


def test_patches_are_sent_as_what_they_are(api: KubeApi) -> None:
    api.create(CONFIG_MAPS, "ml", {"metadata": {"name": "one"}, "data": {"a": "1", "b": "2"}})
    api.patch(CONFIG_MAPS, "ml", "one", {"data": {"a": None, "c": "3"}})
    operations = [{"op": "test", "path": "/data/b", "value": "2"}, {"op": "replace", "path": "/data/b", "value": "4"}]
    patched = api.patch(CONFIG_MAPS, "ml", "one", operations, PatchType.JSON)
    assert patched["data"] == {"b": "4", "c": "3"}
    with pytest.raises(UsageError):
        api.patch(CONFIG_MAPS, "ml", "one", operations, PatchType.JSON)


def test_the_status_is_written_apart(api: KubeApi) -> None:
    made = api.create(GPU_LEDGERS, "ml", {"metadata": {"name": "default"}, "spec": {"queues": []}, "status": {"x": 1}})
    assert "status" not in made
    written = api.replace(GPU_LEDGERS, "ml", {**made, "spec": {}, "status": {"leases": []}}, "status")
    assert (written["spec"], written["status"]) == ({"queues": []}, {"leases": []})
    api.patch(GPU_LEDGERS, "ml", "default", {"spec": {"queues": [1]}, "status": {"leases": [1]}})
    patched = api.patch(GPU_LEDGERS, "ml", "default", {"status": {"waiting": []}}, subresource="status")
    assert (patched["spec"], patched["status"]) == ({"queues": [1]}, {"leases": [], "waiting": []})


def test_a_review_is_answered_by_creating_it(api: KubeApi, server: KubeServer) -> None:
    server.tokens["secret"] = "system:serviceaccount:ml:tiphys-executor-plugin"
    status = api.create(TOKEN_REVIEWS, None, {"spec": {"token": "secret"}})["status"]
    assert (status["authenticated"], status["user"]["username"]) == (True, server.tokens["secret"])


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, UsageError),
        (401, ForbiddenError),
        (403, ForbiddenError),
        (404, NotFoundError),
        (405, UsageError),
        (409, ConflictError),
        (410, ExpiredError),
        (413, UsageError),
        (415, UsageError),
        (422, UsageError),
        (429, StoreError),
        (500, StoreError),
        (503, StoreError),
        (504, StoreError),
    ],
)
def test_every_refusal_has_its_error_and_keeps_its_words(
    api: KubeApi, server: KubeServer, status: int, error: type[Exception]
) -> None:
    server.fail_next(status, message="because of this")
    with pytest.raises(error, match="because of this") as caught:
        api.create(PODS, "ml", {"metadata": {"name": "one"}})
    assert type(caught.value) is error
    assert server.count("create") == 1


@pytest.mark.parametrize("body", [b"<html>a proxy</html>", b"", b"\xff\xfe", b'"text"', b'{"message": null}'])
def test_a_refusal_without_words_is_recognised_by_its_status(api: KubeApi, server: KubeServer, body: bytes) -> None:
    server.fail_next(502, body=body)
    with pytest.raises(StoreError, match=r"answered 502: ."):
        api.get(PODS, "ml", "one")


@pytest.mark.parametrize("body", [b"<html>a login page</html>", b"", b"[]", b"null", b'{"half":', b"\xff\xfe"])
def test_an_answer_that_is_no_object_is_trouble_of_the_server(api: KubeApi, server: KubeServer, body: bytes) -> None:
    for call in (lambda: api.get(PODS, "ml", "one"), lambda: api.list(PODS, "ml"), lambda: api.get_path("/version")):
        server.fail_next(200, body=body)
        with pytest.raises(StoreError, match=server.url):
            call()


def test_a_redirect_is_not_followed(api: KubeApi, server: KubeServer) -> None:
    server.fail_next(302, body=b"")
    with pytest.raises(StoreError, match="302"):
        api.get(PODS, "ml", "one")


def test_a_server_that_is_away_is_named_and_asked_once(api: KubeApi, server: KubeServer) -> None:
    server.pause()
    for verb, call in {
        "get": lambda: api.get(PODS, "ml", "one"),
        "list": lambda: api.list(PODS, "ml"),
        "create": lambda: api.create(PODS, "ml", {"metadata": {"name": "one"}}),
        "update": lambda: api.replace(PODS, "ml", {"metadata": {"name": "one"}}),
        "delete": lambda: api.delete(PODS, "ml", "one"),
        "watch": lambda: api.watch(PODS, "ml", "1"),
    }.items():
        with pytest.raises(StoreError, match=server.url):
            call()
        assert server.count(verb) == 1
    server.resume()
    assert api.get(PODS, "ml", "one") is None


@pytest.mark.parametrize("kind", [PODS, WORKFLOWS], ids=["built-in", "custom"])
def test_a_patch_may_say_which_object_is_meant(kind: Resource, api: KubeApi) -> None:
    made = api.create(kind, "ml", {"metadata": {"name": "one"}})
    meant = {"uid": made["metadata"]["uid"], "labels": {"a": "b"}}
    assert api.patch(kind, "ml", "one", {"metadata": meant})["metadata"]["labels"] == {"a": "b"}
    with pytest.raises(ConflictError):
        api.patch(kind, "ml", "one", {"metadata": {**meant, "uid": "00000000-0000-0000-0000-000000000000"}})


def test_a_text_that_the_server_passes_on_is_handed_out_whatever_its_status(api: KubeApi, server: KubeServer) -> None:
    assert api.get_text("/version")[0] == 200
    server.fail_next(503, verb="get", body=b"not ready: no bucket")
    assert api.get_text("/version") == (503, "not ready: no bucket")
    server.pause()
    with pytest.raises(StoreError):
        api.get_text("/version")


def test_a_port_without_a_listener_is_an_error_at_once() -> None:
    with socket.socket() as taken:  # bound, so that nobody else gets it, and not listening
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StoreError, match="refused"):
            KubeApi(url, PoolManager(), "ml").get_path("/version")


def test_a_write_whose_answer_is_lost_is_not_repeated(api: KubeApi, server: KubeServer) -> None:
    made = api.create(LEASES, "ml", {"metadata": {"name": "one"}})
    server.fail_next(0, verb="update", done=True)
    with pytest.raises(StoreError):
        api.replace(LEASES, "ml", {**made, "spec": {"holderIdentity": "me"}})
    assert server.count("update") == 1
    assert server.objects("leases")[0]["spec"] == {"holderIdentity": "me"}


def test_a_list_is_read_in_pages_of_one_moment(api: KubeApi, server: KubeServer) -> None:
    for index in range(7):
        api.create(PODS, "ml", {"metadata": {"name": f"pod-{index}"}})
    before = str(server.store.version)

    def meanwhile(request: Request) -> bool:
        if request.verb == "list":
            server.store.delete(server.store.places()[-1], {})
        return True

    server.authorize = meanwhile
    expected = [f"pod-{index}" for index in range(6)]  # the first deletion came before the first page
    listing = api.list(PODS, "ml", limit=3)
    assert [one["metadata"]["name"] for one in listing.items] == expected
    assert int(listing.resource_version) == int(before) + 1
    assert server.count("list") == 2


def test_a_list_whose_pages_expire_is_read_whole(api: KubeApi, server: KubeServer) -> None:
    for index in range(5):
        api.create(PODS, "ml", {"metadata": {"name": f"pod-{index}"}})

    def forgetful(request: Request) -> bool:
        server.compact()
        return True

    server.authorize = forgetful
    assert len(api.list(PODS, "ml", limit=2).items) == 5
    assert server.count("list") == 3


def test_listed_objects_say_what_they_are(api: KubeApi) -> None:
    for resource in (PODS, WORKFLOWS):
        api.create(resource, "ml", {"metadata": {"name": "one"}})
        [found] = api.list(resource, "ml").items
        assert (found["apiVersion"], found["kind"]) == (resource.api_version, resource.kind)


@pytest.mark.parametrize("name", ["", ".", "..", "../../secrets/other", "a/b", "%2e%2e"])
def test_a_name_cannot_lead_to_another_object(api: KubeApi, server: KubeServer, name: str) -> None:
    for call in (lambda: api.get(PODS, "ml", name), lambda: api.delete(PODS, "ml", name), lambda: api.list(PODS, name)):
        with pytest.raises(UsageError, match="no valid name"):
            call()
    assert server.requests == []


def test_a_name_with_a_question_mark_is_still_a_name(api: KubeApi, server: KubeServer) -> None:
    assert api.get(PODS, "ml", "one?watch=true") is None
    assert server.requests[-1].name == "one?watch=true"


def test_credentials_are_asked_for_each_request(server: KubeServer) -> None:
    server.tokens = {"first": "before", "second": "after"}
    tokens = iter(["first", "second", "third"])
    api = KubeApi(server.url, PoolManager(), "ml", lambda: f"Bearer {next(tokens)}")
    server.authenticate = True
    api.list(PODS, "ml")
    api.list(PODS, "ml")
    with pytest.raises(ForbiddenError, match="does not accept these credentials: Unauthorized"):
        api.list(PODS, "ml")
    assert [request.user for request in server.requests] == ["before", "after", ""]
    api.close()


def test_a_forbidden_request_names_the_missing_right(server: KubeServer) -> None:
    server.tokens["mine"] = "system:serviceaccount:ml:me"
    server.authorize = lambda request: request.verb != "list"
    with pytest.raises(ForbiddenError, match='User "system:serviceaccount:ml:me" cannot list resource "pods"'):
        server.api("ml", token="mine").list(PODS, "ml")


def test_threads_share_one_client(api: KubeApi, server: KubeServer) -> None:
    def work(number: int) -> None:
        for index in range(5):
            name = f"pod-{number}-{index}"
            made = api.create(PODS, "ml", {"metadata": {"name": name}})
            assert api.get(PODS, "ml", name) == made

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(server.objects("pods")) == 40


def test_a_watch_tells_what_happens_after_a_version_and_ends_with_a_bookmark(api: KubeApi, server: KubeServer) -> None:
    version = api.list(PODS, "ml").resource_version
    api.create(PODS, "ml", {"metadata": {"name": "one", "labels": {"a": "b"}}})
    api.create(PODS, "other", {"metadata": {"name": "elsewhere", "labels": {"a": "b"}}})
    api.patch(PODS, "ml", "one", {"metadata": {"labels": {"a": None}}})
    events = list(api.watch(PODS, "ml", version, labels="a=b", timeout_seconds=0))
    assert [event["type"] for event in events] == ["ADDED", "DELETED", "BOOKMARK"]
    assert events[-1]["object"]["metadata"]["resourceVersion"] == str(server.store.version)


def test_a_watch_of_a_forgotten_version_has_expired(api: KubeApi, server: KubeServer) -> None:
    version = api.list(PODS, "ml").resource_version
    api.create(PODS, "ml", {"metadata": {"name": "one"}})
    server.compact()
    with pytest.raises(ExpiredError):
        list(api.watch(PODS, "ml", version))
    server.fail_next(410)
    with pytest.raises(ExpiredError):
        api.watch(PODS, "ml", version)


def test_a_watch_that_breaks_off_says_so(api: KubeApi, server: KubeServer) -> None:
    version = api.list(PODS, "ml").resource_version
    api.create(PODS, "ml", {"metadata": {"name": "one"}})
    events = api.watch(PODS, "ml", version)
    assert next(events)["type"] == "ADDED"
    server.drop_watches()
    with pytest.raises(StoreError, match="was interrupted"):
        next(events)


def test_a_watch_that_says_nothing_is_given_up(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiphys.kube.api._SILENCE_SECONDS", 0.05)
    with pytest.raises(StoreError, match="timed out"):
        list(api.watch(PODS, "ml", "1000000"))


@pytest.mark.parametrize(
    "line",
    [
        b"<html>",
        b"[]",
        b"7",
        b"{}",
        b'{"type": "ADDED"}',
        b'{"type": "ADDED", "object": {}}',
        b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": null}}}',
        b'{"type": "ERROR", "object": {"code": 500, "message": "etcd"}}',
    ],
)
def test_garbage_in_a_watch_is_trouble_of_the_server(api: KubeApi, server: KubeServer, line: bytes) -> None:
    server.fail_next(200, body=line + b"\n", verb="watch")
    with pytest.raises(StoreError):
        list(api.watch(PODS, "ml", "1"))


def test_of_each_object_of_a_list_is_kept_what_is_wanted(api: KubeApi) -> None:
    for index in range(5):
        api.create(PODS, "ml", {"metadata": {"name": f"pod-{index}"}, "spec": {"index": index}})

    def odd(pod: Object) -> Object | None:
        return {"name": pod["metadata"]["name"]} if pod["spec"]["index"] % 2 else None

    listing = api.list(PODS, "ml", limit=2, transform=odd)
    assert listing.items == [{"name": "pod-1"}, {"name": "pod-3"}]
    assert listing.resource_version


def test_lines_of_a_text_come_whole(api: KubeApi, server: KubeServer) -> None:
    server.fail_next(200, verb="get", body="one\n\ntwo £\nno end".encode())
    assert list(api.read_lines("/version", {"tailLines": "4"})) == ["one\n", "\n", "two £\n", "no end"]
    with pytest.raises(NotFoundError):
        api.read_lines("/api/v1/namespaces/ml/pods/none/log", {})
