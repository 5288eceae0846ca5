"""Paths, patches, surroundings, locks: what stands between a container and this machine."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stories.local_engine import workflow
from tiphys_plugin import DirectoryCluster, PodStatus

from hera_pipelines.local.live_workflows import hold_workflow_lock, is_workflow_locked
from hera_pipelines.local.pods.pod_files import (
    DEFAULT_GRACE_SECONDS,
    WorkflowVolumes,
    parse_pod_spec_patch,
)
from hera_pipelines.local.pods.pod_paths import PathMapping
from hera_pipelines.local.pods.process import ProcessEnvironment
from hera_pipelines.local.run_session import mark_dead_workflows_failed
from hera_pipelines.local.workflow_object import add_server_fields
from tiphys.errors import ConflictError, UsageError
from tiphys.records import utc_now

ROOT = Path("/state/root")


def layout(*paths: str, keep: str = "", **mounts: Path) -> PathMapping:
    return PathMapping(ROOT, {f"/{name}": path for name, path in mounts.items()}, paths, keep)


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("/out", "/state/root/out"),
        ("--out=/out", "--out=/state/root/out"),
        ("cat /out/model.pt", "cat /state/root/out/model.pt"),
        ("file:///out/x", "file:///state/root/out/x"),
        ("'/out'", "'/state/root/out'"),
        ("/outer", "/outer"),
        ("/out-2", "/out-2"),
        ("/out.bak", "/out.bak"),
        ("s3://bucket/out", "s3://bucket/out"),
        ("/tmp/out", "/tmp/out"),
        ("../out", "../out"),
    ],
)
def test_only_whole_declared_paths_are_moved(text: str, rewritten: str) -> None:
    assert layout("/out").rewrite_paths(text) == rewritten


def test_the_longest_path_wins_and_volumes_have_places_of_their_own() -> None:
    places = layout("/data", "/data/out", "/data/out/deep", data=Path("/claims/d"))
    assert places.rewrite_paths("/data /data/out/x /data/out/deep") == "/claims/d /claims/d/out/x /claims/d/out/deep"


def test_the_store_stays_where_it_is() -> None:
    places = layout("/data", keep="file:///data/tiphys")
    assert (
        places.rewrite_paths("file:///data/tiphys/lineages /data/x")
        == "file:///data/tiphys/lineages /state/root/data/x"
    )


@given(st.text(alphabet="/ab.-_ =:", max_size=30))
def test_a_text_without_the_path_stays_as_it_is(text: str) -> None:
    assert layout("/declared").rewrite_paths(text) == text


def test_a_patch_in_either_notation() -> None:
    assert parse_pod_spec_patch("") == parse_pod_spec_patch("{}")
    assert parse_pod_spec_patch("").grace_seconds == DEFAULT_GRACE_SECONDS
    text = "terminationGracePeriodSeconds: 120\ncontainers:\n- name: main\n  env: [{name: A, value: b}]\n"
    patch = parse_pod_spec_patch(text)
    assert (patch.grace_seconds, patch.environment) == (120.0, {"A": "b"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "not a map"),
        ("{broken", "neither JSON nor YAML"),
        ('{"hostNetwork": true}', "does not support hostNetwork"),
        ('{"containers": [{"name": "sidecar"}]}', r"containers\[sidecar\]"),
        ('{"containers": [{"name": "main", "command": ["x"]}]}', r"containers\[main\].command"),
    ],
)
def test_a_patch_that_would_change_the_program_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_pod_spec_patch(text)


def test_the_store_of_the_engine_replaces_that_of_the_pipeline_but_not_a_volume(tmp_path: Path) -> None:
    surroundings = ProcessEnvironment(tmp_path, "file:///here")
    here = {"TIPHYS_STORE": "s3://there", "TIPHYS_CHECKPOINT_STORE": "s3://there"}
    volume = {"TIPHYS_STORE": "s3://there", "TIPHYS_CHECKPOINT_STORE": "file:///mnt"}
    assert surroundings.build_environment(here)["TIPHYS_CHECKPOINT_STORE"] == "file:///here"
    assert surroundings.build_environment(volume)["TIPHYS_CHECKPOINT_STORE"] == "file:///mnt"
    assert "TIPHYS_STORE" not in surroundings.build_environment({"A": "1"})


def test_modules_beside_the_pipeline_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert ProcessEnvironment(tmp_path, "").build_environment({})["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/elsewhere"


def test_the_trace_context_is_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = {"TRACEPARENT": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "TRACESTATE": "a=1"}
    for name, value in context.items():
        monkeypatch.setenv(name, value)
    assert context.items() <= ProcessEnvironment(tmp_path, "").build_environment({}).items()


def test_a_grace_period_can_be_cut_but_not_made_longer(tmp_path: Path) -> None:
    assert ProcessEnvironment(tmp_path, "").grace_seconds(600) == 600
    assert ProcessEnvironment(tmp_path, "", 2.0).grace_seconds(600) == 2
    assert ProcessEnvironment(tmp_path, "", 20.0).grace_seconds(5) == 5


def test_hidden_files_are_not_part_of_the_code(tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / ".git").mkdir(parents=True)
    (code / "train.py").touch()
    ProcessEnvironment(code, "").prepare_working_folder(tmp_path / "work")
    assert [entry.name for entry in (tmp_path / "work").iterdir()] == ["train.py"]


def test_claims_of_a_workflow_and_of_everybody(tmp_path: Path) -> None:
    claims = [{"metadata": {"name": "own"}}]
    shared = [{"name": "data", "persistentVolumeClaim": {"claimName": "datasets"}}]
    volumes = WorkflowVolumes(workflow(volumes=shared, volumeClaimTemplates=claims), tmp_path)
    template = {"volumes": [{"name": "scratch", "emptyDir": {}}]}
    assert volumes.folders_for(template) == {
        "own": tmp_path / "volumes" / "wf" / "own",
        "data": tmp_path / "volumes" / "datasets",
        "scratch": None,
    }


def test_a_lock_is_held_until_it_is_let_go(tmp_path: Path) -> None:
    assert not is_workflow_locked(tmp_path, "wf")
    with hold_workflow_lock(tmp_path, "wf"):
        assert is_workflow_locked(tmp_path, "wf")
        assert not is_workflow_locked(tmp_path, "other")
        with pytest.raises(ConflictError, match="another engine runs workflow wf"), hold_workflow_lock(tmp_path, "wf"):
            pass
    assert not is_workflow_locked(tmp_path, "wf")


def test_only_workflows_that_lost_their_engine_are_buried(tmp_path: Path) -> None:
    cluster = DirectoryCluster(tmp_path / "cluster")
    for name, phase in {"dead": "Running", "alive": "Running", "done": "Succeeded", "new": "Pending"}.items():
        document = add_server_fields(workflow(name=name), utc_now())
        document["status"] = {"phase": phase}
        cluster.write_workflow(document)
        uid = document["metadata"]["uid"]
        cluster.write_pod(PodStatus(name=f"{name}-pod", workflow_uid=uid, node=f"{name}.fit", phase="Running"))
        finished = {"phase": "Succeeded", "exit_code": 0}
        cluster.write_pod(PodStatus(name=f"{name}-old", workflow_uid=uid, node=f"{name}.prep", **finished))
    with hold_workflow_lock(tmp_path, "alive"):
        assert mark_dead_workflows_failed(cluster, tmp_path) == ["dead"]
    found = {workflow["metadata"]["name"]: workflow for workflow in cluster.workflows()}
    assert {name: w["status"]["phase"] for name, w in found.items()} == {
        "dead": "Failed",
        "alive": "Running",
        "done": "Succeeded",
        "new": "Pending",
    }
    pods = {pod.name: pod for pod in cluster.workflow_pods(found["dead"]["metadata"]["uid"])}
    assert (pods["dead-pod"].phase, pods["dead-pod"].reason, pods["dead-old"].phase) == (
        "Failed",
        "NodeLost",
        "Succeeded",
    )
    assert [pod.phase for pod in cluster.workflow_pods(found["alive"]["metadata"]["uid"])] == ["Succeeded", "Running"]
    assert mark_dead_workflows_failed(cluster, tmp_path) == ["alive"]


def test_a_workflow_that_ends_while_it_is_looked_at_is_not_buried(tmp_path: Path) -> None:
    document = add_server_fields(workflow(), utc_now())
    document["status"] = {"phase": "Running"}

    class Ending(DirectoryCluster):
        """The engine writes its end and drops its lock right after the listing."""

        def workflows(self) -> list[dict[str, Any]]:
            found = super().workflows()
            self.write_workflow({**document, "status": {"phase": "Succeeded"}})
            return found

    cluster = Ending(tmp_path / "cluster")
    cluster.write_workflow(document)
    assert mark_dead_workflows_failed(cluster, tmp_path) == []
    assert [w["status"]["phase"] for w in cluster.workflows()] == ["Succeeded"]


def test_a_workflow_is_created_with_what_an_api_server_adds() -> None:
    manifest = workflow()
    manifest["metadata"] = {"generateName": "digits-"}
    document = add_server_fields(manifest, utc_now())
    assert document["metadata"]["name"].startswith("digits-")
    assert document["metadata"].keys() == {"generateName", "name", "namespace", "uid", "creationTimestamp"}
    assert manifest["metadata"] == {"generateName": "digits-"}
