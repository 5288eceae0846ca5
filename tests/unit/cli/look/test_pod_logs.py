"""The output of an attempt: from its pods, from Argo's archive once they are gone, or from nowhere.

| pods | archive                     | what is printed           |
|------|-----------------------------|---------------------------|
| live | not asked                   | the log of the pod        |
| gone | an artifact `main-logs`     | the archived file         |
| gone | of another attempt, outside | nothing                   |
| -    | what the program stored     | that, where nothing else is |

The pods of a step without a gate have no labels: those of its node and of the tries of that are its own.
"""

import gzip
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.builders.argo_pods import pod, runs
from support.builders.compiled_workflows import History, gated, pipeline_of, ungated
from support.servers.kube_server import KubeServer, serving
from support.stories.kubeconfig_folder import Desk
from tiphys_controller import start_run
from tiphys_controller.kubernetes import KubernetesSubmitter

from hera_pipelines.cli.look.pod_logs import ClusterPodLogs, StoredLogs
from tiphys.errors import NotFoundError
from tiphys.kube import KubeApi, identify_cluster
from tiphys.kube.resources import PODS, WORKFLOWS
from tiphys.records import AttemptClaim, item_step_id, utc_now
from tiphys.store import DirectoryStore, Store, read_step_attempts

RUN = "digits-1"
NODE = f"{RUN}.fit.run(0)"


class Here:
    """A run on a cluster whose step ``fit`` has one open attempt."""

    def __init__(self, server: KubeServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api: KubeApi = server.api("ml")
        self.store: Store = DirectoryStore(folder / "store")
        submitter = KubernetesSubmitter(self.api, identify_cluster(self.api))
        start_run(self.store, submitter, pipeline_of(gated("fit"), ungated("prep")), RUN, namespace="ml")
        workflow = self.api.get(WORKFLOWS, "ml", RUN)
        assert workflow is not None
        self.uid = workflow["metadata"]["uid"]
        self.text = "one\ntime=1 argo=true\ntwo\n"
        self.asked: list[Mapping[str, str]] = []
        monkeypatch.setattr(self.api, "read_lines", self._read_lines)
        self.claim("fit", f"{RUN}.fit.admit", f"{RUN}.fit")

    def claim(self, step: str, node: str, instance: str) -> None:
        """An open attempt of a step, as its admit or the recorder claims it."""
        claim = AttemptClaim(
            run=RUN, step=step, attempt=1, submission=1, uid=self.uid, node=node, instance=instance, step_key="k"
        )
        self.store.create(History(self.store, RUN).layout.attempt(step, 1), claim.to_bytes())

    def _read_lines(self, path: str, query: Mapping[str, str]) -> Iterator[str]:
        self.asked.append({"path": path, **query})
        return iter(self.text.splitlines(True))

    def add_pod(self) -> None:
        self._create_pod("fit-pod", NODE, {"tiphys.dev/run": RUN, "tiphys.dev/step": "fit"})

    def add_ungated_pod(self, name: str, node: str, uid: str = "") -> None:
        self._create_pod(name, f"{RUN}.{node}", {}, uid)

    def _create_pod(self, name: str, node: str, labels: Mapping[str, str], uid: str = "") -> None:
        body = pod(runs("main"), name=name, node=node, workflow=RUN, uid=uid or self.uid, labels=labels)
        body["spec"] = {"containers": [{"name": "wait"}, {"name": "main"}]}
        self.api.create(PODS, "ml", body)

    def set_status(self, status: dict[str, Any]) -> None:
        self.api.patch(WORKFLOWS, "ml", RUN, {"status": status})

    def found(
        self, tail: int | None = None, follow: bool = False, max_bytes: int | None = None, step: str = "fit"
    ) -> list[tuple[str, list[str]]]:
        [attempt] = read_step_attempts(self.store, RUN, step)
        logs = ClusterPodLogs(self.store, self.api)
        return [(log.source, list(log.lines)) for log in logs.find(attempt.claim, tail, follow, max_bytes)]


@pytest.fixture
def server() -> Iterator[KubeServer]:
    with serving() as server:
        yield server


@pytest.fixture
def here(server: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(server, tmp_path, monkeypatch)


def test_a_pod_that_has_not_started_is_said_to_wait_and_why(
    here: Here, server: KubeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(server, tmp_path, capsys)
    message = "0/1 nodes are available: 1 Insufficient cpu."
    no_node = {"type": "PodScheduled", "status": "False", "message": message}
    monkeypatch.setattr("hera_pipelines.cli.look.logs.utc_now", lambda: utc_now() + timedelta(minutes=1))
    here.set_status({"phase": "Running"})
    here.api.patch(WORKFLOWS, "ml", RUN, {"metadata": {"labels": {"tiphys.dev/pipeline": "digits"}}})  # as compile does
    body = pod(phase="Pending", conditions=(no_node,), name="fit-pod", node=NODE, workflow=RUN, uid=here.uid)
    here.api.create(PODS, "ml", body)
    for step, why in (("eval", message), ("fit2", "0/1 nodes are available: 1 node(s) were full.")):
        no_node = {"type": "PodScheduled", "status": "False", "message": why}
        node = f"{RUN}.{step}.run(0)"
        other = pod(phase="Pending", conditions=(no_node,), name=f"a-{step}", node=node, workflow=RUN, uid=here.uid)
        here.api.create(PODS, "ml", other)
    code, out, err = desk.tiphys("logs", RUN, "--store", str(tmp_path / "store"))
    assert (code, out) == (0, ""), err
    assert f"{RUN}/fit attempt 1 has not started: no node takes its pod: {message}; free or add nodes" in err
    assert "were full" not in err
    here.api.delete(PODS, "ml", "fit-pod")
    code, _, err = desk.tiphys("logs", RUN, "--store", str(tmp_path / "store"))
    assert code == 3
    assert "its pods are gone" in err


def archived(key: str, node: str = NODE) -> dict[str, Any]:
    artifact = {"name": "main-logs", "s3": {"key": key}}
    return {"one": {"id": "one", "name": node, "type": "Pod", "outputs": {"artifacts": [artifact]}}}


def test_the_log_of_a_pod_is_that_of_the_program(here: Here) -> None:
    here.add_pod()
    assert here.found() == [("pod in ml", ["one\n", "two\n"])]
    assert here.asked[0] == {
        "path": "/api/v1/namespaces/ml/pods/fit-pod/log",
        "container": "main",
        "tailLines": "",
        "follow": "",
    }


def test_the_last_lines_are_those_of_the_program(here: Here) -> None:
    here.add_pod()
    here.text = "one\ntwo\n" + "time=1 argo=true\n" * 10
    assert here.found(tail=1) == [("pod in ml", ["two\n"])]


def test_a_pod_that_is_followed_tells_all_that_comes(here: Here) -> None:
    here.add_pod()
    assert here.found(follow=True) == [("pod in ml", ["one\n", "two\n"])]
    assert here.asked[0]["follow"] == "true"


def test_of_a_large_log_only_the_end_is_read(here: Here) -> None:
    here.store.create("data/argo/fit/main.log", b"kept\nlonger\n")
    here.set_status({"nodes": archived(here.store.artifact_key("data/argo/fit/main.log"))})
    assert [lines for _, lines in here.found(max_bytes=8)] == [["\n", "longer\n"]]
    here.add_pod()
    here.found(tail=9, max_bytes=8)
    assert here.asked[0]["limitBytes"] == "8"


@pytest.mark.parametrize("compressed", [False, True])
def test_the_log_archived_by_argo_is_shown_when_the_pod_is_gone(here: Here, compressed: bool) -> None:
    here.store.create("data/argo/fit/main.log", b"kept\nlonger\n")
    nodes = archived(here.store.artifact_key("data/argo/fit/main.log"))
    packed = {"compressedNodes": b64encode(gzip.compress(json.dumps(nodes).encode())).decode()}
    here.set_status(packed if compressed else {"nodes": nodes})
    assert here.found() == [("archived by Argo as data/argo/fit/main.log", ["kept\n", "longer\n"])]
    assert [lines for _, lines in here.found(tail=1)] == [["longer\n"]]


def test_the_archive_of_another_step_or_store_is_not_of_this_attempt(here: Here) -> None:
    here.store.create("data/argo/other/main.log", b"kept\n")
    here.set_status({"nodes": archived(here.store.artifact_key("data/argo/other/main.log"), f"{RUN}.fitness.run(0)")})
    assert here.found() == []


def test_a_pod_whose_container_has_not_started_has_no_log(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, query: Mapping[str, str]) -> Iterator[str]:
        raise NotFoundError(f"{path} {query}")

    here.add_pod()
    monkeypatch.setattr(here.api, "read_lines", refuse)
    assert here.found() == []


def test_the_pods_of_a_step_without_a_gate_are_those_of_its_node(here: Here) -> None:
    here.claim("prep", f"{RUN}.prep", f"{RUN}.prep")
    for number in (10, 9, 0):
        here.add_ungated_pod(f"prep-{number}", f"prep({number})")
    here.add_ungated_pod("of-another-step", "prepare(0)")
    here.add_ungated_pod("of-a-namesake", "prep(1)", uid="uid-before")
    assert [lines for _, lines in here.found(step="prep")] == [["one\n", "two\n"]] * 3
    assert [one["path"].split("/")[6] for one in here.asked] == ["prep-0", "prep-9", "prep-10"]


def test_the_pods_of_an_item_are_not_those_of_another(here: Here) -> None:
    step = item_step_id("sweep", "0.1", 0)
    here.claim(step, f"{RUN}.sweep(1:0.1)", f"{RUN}.sweep(1:0.1)")
    for name, node in (("a", "sweep(1:0.1)"), ("b", "sweep(11:0.1)"), ("c", "sweep(0:0.2)(0)"), ("d", "sweep")):
        here.add_ungated_pod(name, node)
    here.found(step=step)
    assert [one["path"].split("/")[6] for one in here.asked] == ["a"]


def test_the_archives_of_all_tries_of_a_step_without_a_gate_are_found(here: Here) -> None:
    here.claim("prep", f"{RUN}.prep", f"{RUN}.prep")
    nodes = {}
    for number, place in enumerate(("prep(0)", "prep(1)", "prepare(0)", "prep")):
        key = f"data/argo/{place}/main.log"
        here.store.create(key, f"{place}\n".encode())
        nodes[str(number)] = {
            **archived(here.store.artifact_key(key), f"{RUN}.{place}")["one"],
            "startedAt": f"2026-01-01T00:0{number}:00Z",
        }
    nodes["3"] |= {"type": "Retry", "outputs": nodes["1"]["outputs"]}
    here.set_status({"nodes": nodes})
    assert [lines for _, lines in here.found(step="prep")] == [["prep(0)\n"], ["prep(1)\n"]]


def test_a_pod_of_a_step_without_a_gate_that_has_not_started_is_said_to_wait_and_why(
    here: Here, server: KubeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(server, tmp_path, capsys)
    here.claim("prep", f"{RUN}.prep", f"{RUN}.prep")
    monkeypatch.setattr("hera_pipelines.cli.look.logs.utc_now", lambda: utc_now() + timedelta(minutes=1))
    here.set_status({"phase": "Running"})
    here.api.patch(WORKFLOWS, "ml", RUN, {"metadata": {"labels": {"tiphys.dev/pipeline": "digits"}}})  # as compile does
    for node, why in ((f"{RUN}.prep(1)", "1 Insufficient cpu."), (f"{RUN}.prepare(1)", "they were full.")):
        no_node = {"type": "PodScheduled", "status": "False", "message": why}
        body = pod(phase="Pending", conditions=(no_node,), name=node[-8:-3], node=node, workflow=RUN, uid=here.uid)
        here.api.create(PODS, "ml", body)
    code, _, err = desk.tiphys("logs", f"{RUN}/prep", "--store", str(tmp_path / "store"))
    assert code == 0, err
    assert f"{RUN}/prep attempt 1 has not started: no node takes its pod: 1 Insufficient cpu." in err
    assert "they were full" not in err


def test_the_log_stored_by_the_program_needs_no_cluster(here: Here) -> None:
    [attempt] = read_step_attempts(here.store, RUN, "fit")
    logs = StoredLogs(here.store)
    assert list(logs.find(attempt.claim, None)) == []
    folder = "data/runs/digits-1/output/fit/000000001/"
    here.store.create(f"{folder}000000000-000000002.log", b"one\ntwo\n")
    [log] = logs.find(attempt.claim, 1)
    assert (log.source, list(log.lines)) == (f"stored by the program below {folder}", ["two\n"])
