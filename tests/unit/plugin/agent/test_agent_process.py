"""The process: tenants, Lease and probes around the agent, against an API server on the loopback device."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from support.fakes.task_sets import Controller
from support.processes.polling import until
from support.servers import http
from support.servers.kube_server import KubeServer
from support.stories.plugin import prep, workflow
from tiphys_plugin.agent import AgentSettings, run
from tiphys_plugin.server.wiring import DeploymentSettings

from tiphys.errors import UsageError
from tiphys.kube import LeaderElector
from tiphys.kube.resources import LEASES, WORKFLOWS
from tiphys.protocol.step_spec import STORE_ANNOTATION

QUICK = AgentSettings(workers=2, writers=1, renew_seconds=0.05)


@pytest.fixture
def log() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as entries:
        yield entries


@contextmanager
def agent(server: KubeServer, root: Path, log: list[Any], **changes: Any) -> Iterator[str]:
    """A process of the agent, as a thread; the address of its probes."""
    installation = DeploymentSettings(str(root / "store"), changes.pop("namespaces", ("ml",)), **changes)
    stop, before = threading.Event(), len(log)
    thread = threading.Thread(target=run, args=(server.api(), installation, "127.0.0.1", 0, stop, QUICK))
    thread.start()
    try:
        until(lambda: started(log, before))
        yield started(log, before)
    finally:
        stop.set()
        thread.join()


def started(log: list[Any], before: int) -> str:
    return next((entry["url"] for entry in log[before:] if entry["event"] == "agent.started"), "")


def submit(server: KubeServer, root: Path) -> str:
    """A compiled Workflow, live; its uid."""
    found = workflow([prep()])
    found["metadata"] |= {
        "annotations": {**found["metadata"]["annotations"], STORE_ANNOTATION: (root / "store").as_uri()}
    }
    del found["metadata"]["resourceVersion"]
    uid: str = server.api().create(WORKFLOWS, "ml", found)["metadata"]["uid"]
    return uid


def admit(uid: str) -> dict[str, Any]:
    body = {"op": "admit", "run": "", "submission": "", "uid": uid, "node": "digits-abc12.prep.admit"}
    return {
        "name": "prep-admit",
        "inputs": {},
        "outputs": {"parameters": [{"name": name} for name in ("run", "attempt")]},
        "plugin": {"tiphys": {**body, "step": "prep", "item": "", "inputs": {}}},
    }


def test_a_compiled_step_is_admitted_by_the_core_of_its_namespace(
    server: KubeServer, tmp_path: Path, log: list[Any]
) -> None:
    controller = Controller(server.api())
    uid = submit(server, tmp_path)
    with agent(server, tmp_path, log):
        controller.create({"n1": admit(uid)}, "digits-abc12", uid)
        until(lambda: controller.entries("digits-abc12"))
        answered = controller.entries("digits-abc12")["n1"]
    assert answered["phase"] == "Succeeded", answered
    values = {one["name"]: one["value"] for one in answered["outputs"]["parameters"]}
    assert (values["run"], values["attempt"]) == ("true", "1")


def test_a_standby_is_ready_and_takes_over(server: KubeServer, tmp_path: Path, log: list[Any]) -> None:
    other = LeaderElector(server.api(), "ml", "tiphys-agent", "another-pod", monotonic=lambda: 0.0)
    assert other.try_acquire_or_renew()
    with agent(server, tmp_path, log) as url:

        def state() -> dict[str, Any]:
            answer = http.get(f"{url}/readyz")
            assert answer.status_code == 200
            return dict(answer.json())

        assert not state()["leader"]
        assert state()["task_sets"] == {"error": ""}
        server.api().patch(LEASES, "ml", "tiphys-agent", {"spec": {"holderIdentity": ""}})
        until(lambda: state()["leader"])


def test_probes_and_metrics_tell_of_agent_and_tenants(server: KubeServer, tmp_path: Path, log: list[Any]) -> None:
    with agent(server, tmp_path, log) as url:
        assert http.get(f"{url}/healthz").status_code == 200
        until(lambda: "tiphys_agent_leader 1.0" in http.get(f"{url}/metrics").text)
        assert 'tiphys_agent_api_requests_total{resource="leases",verb="create"} 1.0' in http.get(f"{url}/metrics").text
        assert "tiphys_agent_open_tasks 0.0" in http.get(f"{url}/metrics").text


def test_trouble_with_task_sets_is_reported(server: KubeServer, tmp_path: Path, log: list[Any]) -> None:
    server.authorize = lambda request: request.plural != "workflowtasksets"
    with agent(server, tmp_path, log) as url:

        def health() -> str:
            return json.dumps(http.get(f"{url}/readyz").json())

        until(lambda: "task sets cannot be watched; the log says where and why" in health())
        assert "namespace ml" not in health()
        until(lambda: any("namespace ml" in str(entry) or entry.get("namespace") == "ml" for entry in log))
        assert '"status": "degraded"' in health()


def test_an_installation_that_cannot_be_is_refused(server: KubeServer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\{namespace\}"):
        run(server.api(), DeploymentSettings(str(tmp_path), None), "127.0.0.1", 0, threading.Event())


def test_the_lease_is_given_up_at_the_end(server: KubeServer, tmp_path: Path, log: list[Any]) -> None:
    with agent(server, tmp_path, log):
        until(lambda: [one["spec"]["holderIdentity"] for one in server.objects("leases")])
    (lease,) = server.objects("leases")
    assert lease["spec"]["holderIdentity"] == ""
