"""The sidecar as a process, driven as Argo's agent drives it.

| what happens                                     | Argo gets                         |
|--------------------------------------------------|-----------------------------------|
| the service answers                              | its answer                        |
| the template is of another plugin                | {}, without a call to the service |
| Argo's token is wrong                            | 403                               |
| Argo's token cannot be read                      | 503                               |
| service away; 401, 403, 404, any 5xx, a redirect | Pending with a sentence           |
| the account's token cannot be read               | Pending with a sentence           |
| the service refuses the body                     | Failed with a sentence            |
| not JSON, no object, too large                   | 400, 400, 413                     |
| SIGTERM with calls under way                     | the answer, or 503                |
"""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fakes.argo_agent import Agent
from support.processes.sidecar import ACCOUNT, OURS, TOKEN, SidecarPod, post, sidecar_url
from support.servers import http
from support.servers.plugin_upstream import upstream
from tiphys_plugin.runtime import requests
from tiphys_plugin.sidecar import forwarding, server
from tiphys_plugin.sidecar.settings import SidecarSettings

from tiphys.errors import UsageError
from tiphys.protocol.operations import PLUGIN_BODY_KEY

LARGEST_MIB = 50


@pytest.fixture(scope="module")
def service():
    with upstream() as running:
        yield running


@pytest.fixture(scope="module")
def pod(tmp_path_factory):
    return SidecarPod(tmp_path_factory.mktemp("pod"))


@pytest.fixture(scope="module")
def shared(service, pod):
    """Starting a process is what takes time, so one serves all tests that leave it as it was."""
    with pod.process(service.url) as running:
        yield running


@pytest.fixture
def sidecar(shared, service):
    service.answers(200)
    service.tokens.clear()
    service.bodies.clear()
    return shared


def read_reply(response: httpx.Response) -> dict[str, Any]:
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    reply: dict[str, Any] = response.json()
    return reply


def test_body_is_handed_on_as_it_is_with_the_accounts_token(sidecar, service):
    service.answers(200, b'{"node": {"phase": "Pending", "message": "waits"}, "requeue": "5s"}')
    body = json.dumps({**OURS, "unknown": "ä"}).encode() + b"  "
    response = post(sidecar, body)
    assert (response.status_code, response.content) == (200, service.body)
    assert service.bodies == [body]
    assert service.tokens == [f"Bearer {ACCOUNT}"]


def test_agent_gets_its_answer(sidecar, service):
    service.answers(200, b'{"node": {"phase": "Succeeded", "message": "done"}}')
    assert Agent(sidecar_url(sidecar), TOKEN).run(OURS) == {"phase": "Succeeded", "message": "done"}


def test_accounts_token_is_read_again_for_each_call(sidecar, service, pod):
    post(sidecar)
    pod.write("account", "renewed")
    post(sidecar)
    pod.write("account", ACCOUNT)
    assert service.tokens == [f"Bearer {ACCOUNT}", "Bearer renewed"]


def test_argos_token_is_read_at_each_call(sidecar, pod):
    pod.write("token", "made-again")
    assert post(sidecar).status_code == 403
    assert post(sidecar, token="made-again").status_code == 200
    pod.write("token", TOKEN)


@pytest.mark.parametrize("content", [b'{"template": {"plugin": {"slack": {}}}}', b"{}", b'{"template": null}'])
def test_foreign_template_is_answered_here(sidecar, service, content):
    response = post(sidecar, content)
    assert (response.status_code, response.json()) == (200, {})
    assert service.bodies == []


@pytest.mark.parametrize("token", ["wrong", TOKEN + "x", TOKEN[:-1]])
def test_wrong_token_is_refused(sidecar, service, token):
    assert post(sidecar, token=token).status_code == 403
    assert service.bodies == []


def test_missing_authorization_is_refused(sidecar, service):
    assert http.post(f"{sidecar_url(sidecar)}{forwarding.EXECUTE_PATH}", json=OURS).status_code == 403
    assert service.bodies == []


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (503, b'{"error": "storage is away"}', "storage is away"),
        (503, b"", "is not ready"),
        (500, b"Internal Server Error", "answered 500: Internal Server Error"),
        (502, b"<html>bad gateway</html>", "answered 502"),
        (504, b"", "answered 504"),
        (403, b'{"error": "who are you?"}', "does not let this pod in: who are you?"),
        (401, b"", "does not let this pod in"),
        (404, b"Not Found", "is not the plugin's service"),
        (302, b"", "answered 302"),
        (204, b"", "answered 204"),
    ],
)
def test_call_without_an_answer_waits_and_says_for_what(sidecar, service, status, body, says):
    service.answers(status, body)
    reply = read_reply(post(sidecar))
    assert (reply["node"]["phase"], reply["requeue"]) == ("Pending", "2.0s")
    assert reply["node"]["message"].startswith("Waiting, for 30 min at most: ")
    assert says in reply["node"]["message"]
    assert "{" not in reply["node"]["message"]


@pytest.mark.parametrize("status", [400, 413])
def test_body_that_the_service_refuses_fails_the_node_with_a_sentence(sidecar, service, status):
    service.answers(status, b'{"error": "too much"}')
    node = read_reply(post(sidecar))["node"]
    assert (node["phase"], node["message"].startswith("Refused: the plugin's service http")) == ("Failed", True)
    assert node["message"].endswith("refused the call: too much")


def test_agent_of_argo_waits_for_as_long_as_the_service_is_away(sidecar, service):
    service.answers(503, b'{"error": "storage is away"}')
    agent = Agent(sidecar_url(sidecar), TOKEN)
    for _ in range(20):
        assert agent.call(OURS)["node"]["phase"] == "Pending"
    service.answers(200, b'{"node": {"phase": "Succeeded", "message": "done"}}')
    assert agent.run(OURS)["phase"] == "Succeeded"


def test_outage_limit_of_the_environment_ends_the_wait(pod, service):
    service.answers(503, b'{"error": "storage is away"}')
    with pod.process(service.url, TIPHYS_OUTAGE_LIMIT_SECONDS="0") as running:
        node = read_reply(post(running))["node"]
    assert node["phase"] == "Failed"
    assert node["message"] == "No answer for 0 min: storage is away. When the cause is gone: `tiphys resume w`"


@pytest.mark.parametrize(
    ("content", "status"), [(b"{", 400), (b"", 400), (b"[1]", 400), (b" " * (1 << 20) + b"{}", 413)]
)
def test_a_body_that_no_agent_sends_is_refused_by_the_sidecar(sidecar, service, content, status):
    response = post(sidecar, content)
    assert (response.status_code, response.headers["content-type"]) == (status, "text/plain; charset=utf-8")
    assert not response.text.startswith("{")
    assert service.bodies == []


def test_an_unknown_path_is_not_found(sidecar):
    assert http.post(f"{sidecar_url(sidecar)}/elsewhere", json={}).status_code == 404


def test_largest_body_is_handed_on(sidecar, service):
    padding = " " * ((1 << 20) - len(json.dumps(OURS).encode()))
    assert post(sidecar, (json.dumps(OURS) + padding).encode()).status_code == 200
    assert len(service.bodies[0]) == 1 << 20


def test_memory_stays_small_after_large_and_simultaneous_calls(sidecar, service):
    """Argo's agent has 16 workers. A step is some kilobytes, a workflow at most 1.5 MB."""
    body = json.dumps({**OURS, "padding": ["x" * 100] * 1000}).encode()
    callers = [threading.Thread(target=lambda: [post(sidecar, body) for _ in range(3)]) for _ in range(16)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(120)
    assert len(service.bodies) == 48
    assert sidecar.resident_bytes() < LARGEST_MIB << 20


def test_service_that_is_away_is_waited_for(pod):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens here, and nobody else can
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pod.process(address) as running:
            node = read_reply(post(running))["node"]
            assert node["phase"] == "Pending"
            assert f"{address} cannot be reached: " in node["message"]
            assert running.stop() == 0
    [failure] = [line for line in running.log if line["event"] == "call.failed"]
    assert (failure["status"], failure["log_level"]) == (200, "error")


def test_missing_tokens_are_named_with_the_remedy(tmp_path, service):
    pod = SidecarPod(tmp_path)
    with pod.process(service.url) as running:
        (tmp_path / "account").unlink()
        node = read_reply(post(running))["node"]
        assert node["phase"] == "Pending"
        assert "create the ServiceAccount tiphys-executor-plugin" in node["message"]
        (tmp_path / "token").unlink()
        response = post(running)
        assert response.status_code == 503
        assert "must not set runAsUser" in response.text


def test_call_under_way_is_answered_when_the_sidecar_has_to_end(pod):
    with upstream() as service, pod.process(service.url) as running:
        service.answers(200, b'{"node": {"phase": "Succeeded"}}')
        service.go.clear()
        answers: list[httpx.Response] = []
        caller = threading.Thread(target=lambda: answers.append(post(running)))
        caller.start()
        assert service.arrived.acquire(timeout=60)
        running.process.terminate()
        assert running.process.wait(60) == 0  # the service says nothing, and yet it ends
        caller.join(60)
    assert answers[0].status_code == 503
    assert "call again" in answers[0].text


def test_no_secret_is_ever_logged(pod, service):
    service.answers(500, b"broken")
    with pod.process(service.url) as running:
        post(running)
        post(running, token="not-" + TOKEN)
        post(running, b"{")
        running.stop()
    assert [line["event"] for line in running.log] == ["sidecar.started", *["call.failed"] * 3, "sidecar.stopped"]
    text = "".join(running.lines)
    assert TOKEN not in text
    assert ACCOUNT not in text


def test_only_the_standard_library_is_loaded():
    """And it works for any user, on a root that nobody may write to."""
    code = (
        "import sys; import tiphys_plugin.sidecar.server, tiphys_plugin.sidecar.__main__; "
        "print([n for n in sys.modules if '.' not in n and n not in sys.stdlib_module_names and not n.startswith('_')])"
    )
    unmeasured = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    found = subprocess.run(
        [sys.executable, "-I", "-c", code], env=unmeasured, capture_output=True, text=True, check=True, timeout=120
    )
    loaded = {name.strip(" '") for name in found.stdout.strip().strip("[]").split(",")}
    assert {name for name in loaded if name and not name.startswith("__")} <= {
        "tiphys",
        "tiphys_plugin",
        "sitecustomize",
    }


@pytest.mark.parametrize(
    "template", [None, {}, {"plugin": {}}, {"plugin": {"tiphys": {}}}, {"plugin": {"x": {}}}, {"plugin": []}, [], "x"]
)
def test_foreign_is_the_same_in_sidecar_and_service(template):
    assert server.is_foreign_template({"template": template}) is not requests.is_tiphys_template(template)
    assert server.PLUGIN_NAME == PLUGIN_BODY_KEY


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("TIPHYS_SERVICE_URL", "", "TIPHYS_SERVICE_URL is ''"),
        ("TIPHYS_SERVICE_URL", "tiphys-plugin:7243", "expected the plugin's service"),
        ("TIPHYS_SERVICE_URL", "http://user:secret@host", "TIPHYS_SERVICE_URL"),
        ("TIPHYS_SERVICE_URL", "http://host:99999", "TIPHYS_SERVICE_URL"),
        ("TIPHYS_SIDECAR_PORT", "http", "TIPHYS_SIDECAR_PORT"),
        ("TIPHYS_SIDECAR_PORT", "70000", "TIPHYS_SIDECAR_PORT"),
        ("TIPHYS_OUTAGE_LIMIT_SECONDS", "30m", "TIPHYS_OUTAGE_LIMIT_SECONDS"),
        ("TIPHYS_OUTAGE_LIMIT_SECONDS", "-1", "TIPHYS_OUTAGE_LIMIT_SECONDS"),
    ],
)
def test_wrong_setting_is_named(variable, value, says):
    with pytest.raises(UsageError, match=says):
        SidecarSettings.from_environment({"TIPHYS_SERVICE_URL": "http://service:7243", variable: value})


def test_settings_left_out_are_those_of_a_pod():
    settings = SidecarSettings.from_environment({"TIPHYS_SERVICE_URL": "https://service"})
    assert (settings.host, settings.port, settings.ca_file) == ("127.0.0.1", 7243, None)
    assert settings.token_file == Path("/var/run/argo/token")
    assert settings.outage_limit_seconds == 1800


def test_port_in_use_is_named(pod):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pod.process("http://127.0.0.1:1", TIPHYS_SIDECAR_PORT=port) as running:
            assert running.process.wait(60) == UsageError.exit_code
    assert port in running.log[0]["error"]


def test_certificate_that_cannot_be_read_is_named(tmp_path):
    given = {"TIPHYS_SERVICE_URL": "https://service", "TIPHYS_SERVICE_CA_FILE": str(tmp_path / "none")}
    with pytest.raises(UsageError, match="TIPHYS_SERVICE_CA_FILE"):
        forwarding.ServiceClient(SidecarSettings.from_environment(given))
