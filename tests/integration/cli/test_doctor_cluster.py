"""``tiphys doctor --cluster`` against an API server: what it finds by itself, and what it does without rights."""

import json
from pathlib import Path

import pytest
from support.servers.kube_server import KubeServer, Request
from support.stories.installed_cluster import install

from tiphys.kube import KubeApi
from tiphys.kube.resources import PODS, SECRETS

from .conftest import Command


@pytest.fixture
def installed(server: KubeServer) -> KubeApi:
    """A cluster with Argo and Tiphys in sidecar mode."""
    return install(server)


def states(out: str) -> dict[str, str]:
    return {"/".join(filter(None, (one["place"], one["check"]))): one["state"] for one in json.loads(out)["findings"]}


def test_a_cluster_that_is_fit(tiphys: Command, installed: KubeApi, kubeconfig: Path) -> None:
    answer = tiphys("doctor", "--cluster", "--kubeconfig", kubeconfig, "-o", "json")
    assert (answer.code, answer.err) == (0, "")
    assert set(states(answer.out).values()) == {"ok"}
    assert json.loads(answer.out)["ready"] is True
    assert next(iter(states(answer.out))) == "requeue-time"
    assert "ml/tokens" in states(answer.out)


def test_doctor_shows_no_secret_and_writes_nothing(
    tiphys: Command, installed: KubeApi, server: KubeServer, kubeconfig: Path
) -> None:
    before = len(server.requests)
    answer = tiphys("doctor", "--cluster", "--kubeconfig", kubeconfig)
    assert answer.code == 0
    assert "c2VjcmV0" not in answer.out + answer.err
    asked = server.requests[before:]
    assert {one.plural for one in asked if one.verb not in ("get", "list")} == {"subjectaccessreviews"}


def test_a_failed_check_says_what_to_do(tiphys: Command, installed: KubeApi, kubeconfig: Path) -> None:
    installed.delete(SECRETS, "ml", "tiphys-workflow.service-account-token")
    answer = tiphys("doctor", "--cluster", "--kubeconfig", kubeconfig)
    assert answer.code == 75
    assert "tokens failed; each finding says what to do" in answer.error
    assert "there is no Secret tiphys-workflow.service-account-token" in answer.out
    assert "→ helm upgrade tiphys" in answer.out


def test_a_right_that_the_account_of_workflows_lacks(
    tiphys: Command, installed: KubeApi, server: KubeServer, kubeconfig: Path
) -> None:
    def without_patch(request: Request) -> bool:
        workflows = request.user == "system:serviceaccount:ml:tiphys-workflow"
        return not (workflows and request.verb == "patch" and request.plural == "workflowtasksets")

    server.authorize = without_patch
    answer = tiphys("doctor", "--cluster", "--kubeconfig", kubeconfig)
    assert answer.code == 75
    assert "account tiphys-workflow may not patch workflowtasksets/status" in answer.out


def test_an_account_of_one_namespace_reads_which_checks_are_unknown(
    tiphys: Command, installed: KubeApi, server: KubeServer, kubeconfig: Path
) -> None:
    server.authorize = lambda request: request.namespace == "ml" or bool(request.path)
    answer = tiphys("doctor", "--cluster", "-n", "ml", "--kubeconfig", kubeconfig, "-o", "json")
    assert answer.code == 0
    found = states(answer.out)
    assert {name for name, state in found.items() if state == "unknown"} >= {"requeue-time", "plugin", "clocks"}
    assert (found["ml/accounts"], found["ml/tokens"], found["ml/rights"]) == ("ok", "ok", "unknown")


@pytest.mark.parametrize(
    ("answered", "reason"),
    [
        ((503, '{"error": "no credentials for s3://ml-runs/tiphys"}'), "no credentials for s3://ml-runs/tiphys"),
        ((404, "not found"), "ContainersNotReady: containers with unready status: [plugin]"),
    ],
    ids=["the process says why", "it cannot be asked"],
)
def test_a_plugin_that_is_not_ready_says_why(
    answered: tuple[int, str],
    reason: str,
    tiphys: Command,
    installed: KubeApi,
    kubeconfig: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = {
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "reason": "ContainersNotReady",
                "message": "containers with unready status: [plugin]",
            }
        ],
        "containerStatuses": [{"state": {"running": {}}}],
    }
    installed.patch(PODS, "tiphys", "plugin-1", {"status": waiting}, subresource="status")
    asked = []
    monkeypatch.setattr(KubeApi, "get_text", lambda _, path: asked.append(path) or answered)
    answer = tiphys("doctor", "--cluster", "--kubeconfig", kubeconfig)
    assert answer.code == 75
    assert f"the plugin is not ready: {reason}" in answer.out
    assert asked == ["/api/v1/namespaces/tiphys/pods/plugin-1:7243/proxy/readyz"]


def test_an_empty_cluster(tiphys: Command, server: KubeServer, kubeconfig: Path) -> None:
    server.api("ml")
    answer = tiphys("doctor", "--cluster", "-n", "ml", "-n", "absent", "--kubeconfig", kubeconfig, "-o", "json")
    assert answer.code == 75
    found = states(answer.out)
    assert (found["argo-kinds"], found["tiphys-kinds"], found["plugin"]) == ("failed", "failed", "failed")
    assert found["absent/exists"] == "failed"


def test_an_api_server_that_is_out_of_reach(tiphys: Command, server: KubeServer, kubeconfig: Path) -> None:
    server.pause()
    answer = tiphys("doctor", "--cluster", "--kubeconfig", kubeconfig)
    assert answer.code == 75
    assert "did not answer" in answer.error


@pytest.mark.parametrize(
    "arguments", [[], ["./store", "--cluster"], ["./store", "-n", "ml"], ["./store", "--context", "east"]]
)
def test_a_store_or_a_cluster_and_not_both(arguments: list[str], tiphys: Command) -> None:
    answer = tiphys("doctor", *arguments)
    assert answer.code == 2
    assert "--cluster" in answer.error
