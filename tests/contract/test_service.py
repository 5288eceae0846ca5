"""The service of a cluster as a process, and the whole way to it: Argo's agent, a sidecar, the service.

| caller                                       | gets                                      |
|----------------------------------------------|-------------------------------------------|
| account of a served namespace                | an answer, for that namespace             |
| the same, about another namespace            | 403, logged; Argo sees 503 and a sentence |
| anybody else                                 | 403                                       |
| anybody, while the API server is away        | 503                                       |
| a probe, whatever is broken                  | 200, and what is broken                   |
"""

import json
import signal
import time
from collections.abc import Callable

import httpx
import prometheus_client
import pytest
from support.fakes.argo_agent import Agent
from support.processes.process import Process
from support.servers import http, kube_server
from support.stories.plugin import fit, gpus, prep
from support.stories.plugin_installation import RELEASE, Site
from tiphys_plugin.__main__ import main
from tiphys_plugin.sidecar.forwarding import EXECUTE_PATH

from tiphys.errors import StoreError, UsageError
from tiphys.kube.resources import WORKFLOWS

ACCOUNT = "system:serviceaccount:{}:tiphys-executor-plugin"
TOKENS = {
    "token-of-ml": ACCOUNT.format("ml"),
    "token-of-vision": ACCOUNT.format("vision"),
    "token-of-foreign": ACCOUNT.format("foreign"),
    "token-of-default": "system:serviceaccount:ml:default",
}


class Running:
    """A site, and a service of it as a process."""

    def __init__(self, here: Site, process: Process, environment: dict[str, str]) -> None:
        self.here = here
        self.process = process
        self.environment = environment
        self.url = process.started["url"].replace("0.0.0.0", "127.0.0.1")

    def post(self, document: object, token: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return http.post(f"{self.url}{EXECUTE_PATH}", json=document, headers=headers)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    root = tmp_path_factory.mktemp("site")
    with kube_server.serving() as server:
        server.tokens = dict(TOKENS)
        here = Site(root, server)
        here.break_store("vision")
        environment = {"KUBECONFIG": str(kube_server.write_kubeconfig(root, server.url, RELEASE))}
        flags = ("--namespace", "ml", "--namespace", "vision", "--port", "0", "--host", "127.0.0.1")
        with Process("tiphys_plugin", "serve", "--store", here.store_url, *flags, **environment) as process:
            yield Running(here, process, environment)
            assert process.stop() == 0
        here.tenants.close()


@pytest.fixture
def in_process(monkeypatch):
    """`main` in the process of the tests, which keeps its own signals and settings."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(prometheus_client, "disable_created_metrics", lambda: None)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_account_is_answered_for_its_own_namespace(running):
    flow = running.here.submit("ml", prep(), name="own")
    response = running.post(flow.document("admit", "prep"), "token-of-ml")
    assert (response.status_code, response.json()["node"]["phase"]) == (200, "Succeeded")


def test_account_that_speaks_for_another_namespace_is_refused_and_logged(running):
    flow = running.here.submit("ml", prep(), name="foreign")
    response = running.post(flow.document("admit", "prep"), "token-of-vision")
    assert response.status_code == 403
    assert "caller of namespace vision spoke for a workflow of namespace ml" in response.json()["error"]
    until(lambda: any(line["event"] == "call.trespassed" for line in running.process.log))


@pytest.mark.parametrize("token", ["", "nobody", "token-of-foreign", "token-of-default"])
def test_a_caller_without_permission_is_refused(running, token):
    flow = running.here.submit("ml", prep(), name=f"refused-{token or 'none'}")
    assert running.post(flow.document("admit", "prep"), token).status_code == 403


def test_api_server_that_is_away_is_503(running):
    running.here.server.tokens["token-that-is-new"] = ACCOUNT.format("ml")
    running.here.server.fail_next(503, plural="tokenreviews", message="etcd is away")
    flow = running.here.submit("ml", prep(), name="patient")
    document = flow.document("admit", "prep")
    response = running.post(document, "token-that-is-new")
    assert response.status_code == 503
    assert "etcd is away" in response.json()["error"]
    assert running.post(document, "token-that-is-new").status_code == 200


def test_probe_says_that_a_store_is_broken_without_naming_namespaces_and_stays_ready(running):
    def state() -> dict:
        response = http.get(f"{running.url}/readyz")
        assert response.status_code == 200
        return response.json()

    until(lambda: state()["status"] == "degraded")
    assert state()["tenants"] == {"failing": 1}
    assert "vision" not in json.dumps(state())
    assert state()["cluster"].startswith("kubernetes:")
    assert http.get(f"{running.url}/healthz").text == "ok\n"


def test_metrics_count_reviews_and_answers(running):
    running.post({"template": {"plugin": {"slack": {}}}}, "token-of-ml")
    text = http.get(f"{running.url}/metrics").text
    assert 'tiphys_reviews_total{result="accepted"}' in text
    assert "tiphys_gpus_held" in text


def test_whole_way_from_argos_agent_over_a_sidecar(running, tmp_path):
    (tmp_path / "argo").write_text("argo-token")
    (tmp_path / "account").write_text("token-of-ml\n")
    settings = {
        "TIPHYS_SERVICE_URL": running.url,
        "TIPHYS_SIDECAR_HOST": "127.0.0.1",
        "TIPHYS_SIDECAR_PORT": "0",
        "TIPHYS_TOKEN_FILE": str(tmp_path / "argo"),
        "TIPHYS_ACCOUNT_TOKEN_FILE": str(tmp_path / "account"),
    }
    flow = running.here.submit("ml", fit(gpu=gpus(8), artifacts=()), name="story")
    other = running.here.submit("vision", prep(), name="theirs")
    with Process("tiphys_plugin.sidecar", **settings) as sidecar:
        agent = Agent(f"http://127.0.0.1:{sidecar.started['port']}", "argo-token")
        assert agent.run(flow.document("admit", "fit", 0))["phase"] == "Succeeded"
        assert agent.run(flow.document("conclude", "fit", 0, status="Succeeded", exit_code="0"))["phase"] == "Succeeded"
        stolen = agent.call(other.document("admit", "prep"))
        assert "does not let this pod in" in stolen["node"]["message"]
        assert agent.call({"template": {"plugin": {"slack": {}}}}) == {}
        assert not agent.disabled


def test_no_token_is_ever_logged(running):
    flow = running.here.submit("ml", prep(), name="quiet")
    for token in (*TOKENS, "nobody"):
        running.post(flow.document("admit", "prep"), token)
    until(lambda: any(line["event"] == "token.refused" for line in running.process.log))
    text = "".join(running.process.lines)
    assert not [token for token in (*TOKENS, "nobody") if token in text]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--store", "s3://ml-runs/tiphys", "--namespace", "a", "--namespace", "b"), "s3://ml-runs/tiphys/{namespace}"),
        (("--store", "s3://ml-runs/tiphys", "--all-namespaces"), "s3://ml-runs/tiphys/{namespace}"),
        (("--store", "s3://ml-runs/{team}", "--namespace", "a"), "placeholder"),
    ],
)
def test_wrong_choice_is_an_error_with_a_way_out(running, in_process, monkeypatch, capsys, flags, says):
    monkeypatch.setenv("KUBECONFIG", running.environment["KUBECONFIG"])
    assert main(["serve", *flags]) == UsageError.exit_code
    assert says in capsys.readouterr().err


def test_cluster_out_of_reach_is_an_error_that_asks_to_be_tried_again(in_process, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KUBECONFIG", str(kube_server.write_kubeconfig(tmp_path, "http://127.0.0.1:1", RELEASE)))
    assert main(["serve", "--store", "s3://ml-runs", "--namespace", "ml"]) == StoreError.exit_code
    assert "did not answer" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "agent"])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"python -m tiphys_plugin {command} " in capsys.readouterr().out


def test_reviewed_caller_needs_a_live_workflow(running):
    flow = running.here.submit("ml", prep(), name="gone")
    running.here.api.delete(WORKFLOWS, "ml", "gone")
    response = running.post(flow.document("admit", "prep"), "token-of-ml")
    assert "is not in cluster" in json.dumps(response.json())
