"""The service over real HTTP: what its status codes mean to Argo's agent.

| request                              | answer                       |
|--------------------------------------|------------------------------|
| right token, our body                | 200 with a node              |
| right token, foreign body            | 200 {}                       |
| no token, or another                 | 403, logged without a token  |
| not JSON / not an object             | 400                          |
| more than 2 MiB                      | 413                          |
| storage out of reach, or a bug       | 503                          |
| any other path                       | 404                          |
"""

import json
import socket
import threading

import httpx
import pytest
import structlog
from support.builders.ledger import queues
from support.fakes.argo_agent import Agent
from support.servers import http
from support.stories.plugin import World, fit, gpus, prep, world
from tiphys_plugin import PluginServer

from tiphys.errors import ConflictError, StoreError, UsageError

TOKEN = "a-secret-token"
PATH = "/api/v1/template.execute"


@pytest.fixture
def here(tmp_path) -> World:
    return world(tmp_path, queues(research={"A100": 8}))


@pytest.fixture
def server(here):
    with PluginServer(here.core, TOKEN) as running:
        yield running
    here.core.close()


@pytest.fixture
def agent(server) -> Agent:
    return Agent(server.url, TOKEN)


def post(server, content: bytes = b"{}", token: str | None = TOKEN) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return http.post(f"{server.url}{PATH}", content=content, headers=headers)


def test_step_runs_from_admit_to_conclude(here, agent):
    flow = here.submit(prep(parameters=()))
    admitted = agent.run(flow.document(flow.body("admit", "prep")))
    answer = {p["name"]: p["value"] for p in admitted["outputs"]["parameters"]}
    here.store.create(f"{answer['outputs']}/0/artifacts/data", b"rows")
    verdict = agent.run(flow.document(flow.body("conclude", "prep", status="Succeeded", exit_code="0")))
    assert verdict["phase"] == "Succeeded"
    assert verdict["outputs"]["artifacts"] == [{"name": "data", "s3": {"key": f"{answer['outputs']}/0/artifacts/data"}}]


def test_training_waits_for_gpus_retries_and_finishes(here, agent):
    first = here.submit(fit(gpu=gpus(8), artifacts=()))
    second = here.submit(fit(gpu=gpus(8), artifacts=()), name="other", uid="uid-2")
    assert agent.run(first.document(first.body("admit", "fit", 0)))["phase"] == "Succeeded"
    waiting = agent.call(second.document(second.body("admit", "fit", 0)))
    assert waiting["node"]["phase"] == "Pending"
    assert waiting["requeue"].endswith("s")
    ended = agent.run(first.document(first.body("conclude", "fit", 0, status="Failed", exit_code="75")))
    assert (ended["phase"], "attempt 2 starts" in ended["message"]) == ("Error", True)
    assert agent.run(second.document(second.body("admit", "fit", 0)))["phase"] == "Succeeded"
    finished = agent.run(second.document(second.body("conclude", "fit", 0, status="Succeeded", exit_code="0")))
    assert finished["phase"] == "Succeeded"
    assert agent.run(first.document(first.body("admit", "fit", 1)))["phase"] == "Succeeded"


def test_restarted_agent_repeats_its_calls_and_nothing_happens_twice(here, agent, server):
    flow = here.submit(prep(parameters=(), artifacts=()))
    documents = [
        flow.document(flow.body("admit", "prep")),
        flow.document(flow.body("conclude", "prep", status="Succeeded")),
    ]
    first = [agent.run(document) for document in documents]
    before = [info.key for info in here.store.list("")]
    again = Agent(server.url, TOKEN)
    assert again.run(documents[1]) == first[1]
    assert again.run(documents[0])["phase"] == "Succeeded"
    assert [info.key for info in here.store.list("")] == before


def test_foreign_body_is_left_to_other_plugins(server, agent):
    assert post(server, b'{"template": {"plugin": {"slack": {}}}}').json() == {}
    assert not agent.disabled


@pytest.mark.parametrize("token", [None, "wrong", TOKEN + "x", "a-secret-toke", "ä"])
def test_wrong_token_is_refused_and_never_logged(server, token):
    with structlog.testing.capture_logs() as logs:
        response = http.post(
            f"{server.url}{PATH}",
            content=b"{}",
            headers=[] if token is None else [(b"authorization", f"Bearer {token}".encode())],
        )
    assert response.status_code == 403
    assert "bearer token is missing or wrong" in response.json()["error"]
    assert [log["event"] for log in logs] == ["call.forbidden"]
    assert TOKEN not in json.dumps(logs)
    assert not token or token not in json.dumps(logs[0])


@pytest.mark.parametrize(("content", "says"), [(b"", "not JSON"), (b"{", "not JSON"), (b"[1]", "not a JSON object")])
def test_a_body_that_no_agent_sends_is_a_bad_request(server, content, says):
    response = post(server, content)
    assert response.status_code == 400
    assert says in response.json()["error"]


def test_body_is_bounded(server):
    assert post(server, b" " * (1 << 20) + b"{}").status_code == 413
    assert post(server, b" " * ((1 << 20) - 2) + b"{}").status_code == 200


def test_storage_out_of_reach_is_waited_for_and_the_agent_gets_through(here, server, agent, monkeypatch):
    flow = here.submit(prep())
    document = flow.document(flow.body("admit", "prep"))
    failures = iter([True, True])
    read = here.store.read

    def shaky(key: str) -> bytes:
        if next(failures, False):
            raise StoreError("storage did not answer")
        return read(key)

    monkeypatch.setattr(here.store, "read", shaky)
    reply = post(server, json.dumps(document).encode()).json()
    assert reply["node"]["phase"] == "Pending"
    assert reply["node"]["message"] == "Waiting, for 30 min at most: storage did not answer"
    assert agent.run(document)["phase"] == "Succeeded"


def test_bug_is_503_with_a_sentence_and_its_trace_in_the_log(here, server, monkeypatch):
    flow = here.submit(prep())
    monkeypatch.setattr(here.store, "read", lambda key: 1 / 0)
    with structlog.testing.capture_logs() as logs:
        response = post(server, json.dumps(flow.document(flow.body("admit", "prep"))).encode())
    assert response.status_code == 503
    assert "ZeroDivisionError" in response.json()["error"]
    assert [log["event"] for log in logs] == ["call.crashed"]


def test_health_readiness_and_metrics_need_no_token(here, server, monkeypatch):
    assert http.get(f"{server.url}/healthz").text == "ok\n"
    assert http.get(f"{server.url}/readyz").status_code == 200
    assert "tiphys_plugin_answers" in http.get(f"{server.url}/metrics").text

    def down(prefix: str):
        raise StoreError("storage did not answer")

    monkeypatch.setattr(here.store, "list", down)
    assert http.get(f"{server.url}/healthz").status_code == 200
    response = http.get(f"{server.url}/readyz")
    assert (response.status_code, response.json()["error"]) == (503, "storage did not answer")


def test_port_in_use_is_named_with_the_way_out(here):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConflictError, match=rf"port {port} .* --plugin-port 0"):
            PluginServer(here.core, TOKEN, port=port).__enter__()


def test_empty_token_is_refused(here):
    with pytest.raises(UsageError, match="token is empty"):
        PluginServer(here.core, "")


def test_host_that_is_not_ours_is_refused(here):
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1:0"):
        PluginServer(here.core, TOKEN, host="192.0.2.1").__enter__()


def test_call_under_way_is_answered_before_the_server_ends(here):
    """The last call is answered although the server was told to stop meanwhile."""
    began, go = threading.Event(), threading.Event()
    read = here.store.read

    def slow(key: str) -> bytes:
        began.set()
        assert go.wait(120)
        return read(key)

    here.store.read = slow
    flow = here.submit(prep())
    server = PluginServer(here.core, TOKEN)
    server.__enter__()
    url = server.url
    answers: list[int] = []

    def call() -> None:
        document = json.dumps(flow.document(flow.body("admit", "prep"))).encode()
        answers.append(
            http.post(f"{url}{PATH}", content=document, headers={"Authorization": f"Bearer {TOKEN}"}).status_code
        )

    caller = threading.Thread(target=call)
    caller.start()
    assert began.wait(120)
    stopper = threading.Thread(target=server.__exit__, args=(None, None, None))
    stopper.start()
    go.set()
    caller.join(120)
    stopper.join(120)
    assert answers == [200]
