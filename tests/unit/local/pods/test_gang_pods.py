"""A training on several nodes as processes of this machine.

| members | node |
|---|---|
| all end well | Succeeded |
| one fails | Failed, by that one; the others are told to stop |
| one fails that can be spared | the others go on; it is what the first makes of it |
| the first fails, or one more than can be spared | Failed; the others are told to stop |
| another kind of object | refused before anything starts |
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.stories.local_engine import Bench, Manifest, call, dag, workflow

from hera_pipelines.local.nodes import NodePhase
from hera_pipelines.local.pods.gang_pods import member_templates
from hera_pipelines.local.supported import find_unsupported
from tiphys.errors import UsageError
from tiphys.protocol.gang import GANG_LABEL
from tiphys.protocol.step_spec import ATTEMPT_LABEL

INDEX = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, code=tmp_path)


def job(source: str, members: int = 3, labels: Manifest | None = None, **pod: Any) -> Manifest:
    """As compile makes it, filled in but for one value."""
    env = [
        {"name": "RANK", "valueFrom": INDEX},
        {"name": "MASTER_ADDR", "value": "gang-0.tiphys-members"},
        {"name": "MASTER_PORT", "value": "29500"},
        {"name": "NOTE", "value": "{{=toJson(string(workflow.name))[1:-1]}}"},
    ]
    container = {"name": "main", "image": "x", "command": ["sh", "-c"], "args": [source], "env": env}
    found = {GANG_LABEL: "gang", ATTEMPT_LABEL: "1"} if labels is None else labels
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "gang", "labels": found},
        "spec": {
            "completions": members,
            "template": {
                "metadata": {"labels": found, "annotations": {}},
                "spec": {"containers": [container], "terminationGracePeriodSeconds": 30, **pod},
            },
        },
    }


def flow(manifest: Manifest) -> Manifest:
    return workflow(
        dag(call("fit")), {"name": "fit", "resource": {"action": "apply", "manifest": json.dumps(manifest)}}
    )


def test_every_member_runs_and_knows_its_rank(bench: Bench) -> None:
    assert bench.run(flow(job('echo "$RANK $MASTER_ADDR $NOTE"'))) == NodePhase.SUCCEEDED
    assert bench.logs("fit") == [f"{rank} 127.0.0.1 wf\n" for rank in range(3)]
    pods = bench.cluster.attempt_pods()
    assert [(pod.rank, pod.phase, pod.node) for pod in pods] == [(rank, "Succeeded", "wf.fit") for rank in range(3)]
    [port] = {variable["value"] for one in member_templates(job("")) for variable in one["container"]["env"][2:3]}
    assert port != "29500", "two trainings on one machine must not meet"


def test_a_failing_member_stops_the_other_members(bench: Bench, tmp_path: Path) -> None:
    others = 'trap "exit 75" TERM; touch up.$RANK; mv up.$RANK "$FOLDER/"; while :; do sleep 0.05; done'
    fails = 'while [ ! -e "$FOLDER/up.0" ] || [ ! -e "$FOLDER/up.2" ]; do sleep 0.05; done; exit 3'
    source = f'FOLDER={tmp_path}; if [ "$RANK" = 1 ]; then {fails}; fi; {others}'
    assert bench.run(flow(job(source))) == NodePhase.FAILED
    assert bench.last("wf.fit").message == "rank 1: main: Error (exit code 3)"
    pods = bench.cluster.attempt_pods()
    assert [(pod.exit_code, pod.reason) for pod in pods] == [(75, "Deleted"), (3, ""), (75, "Deleted")]
    first = min(pods, key=lambda pod: str(pod.trouble_at))
    assert first.rank == 1


def elastic(source: str) -> Manifest:
    """Of three members one may be lost."""
    made = job(source)
    made["spec"] |= {"backoffLimitPerIndex": 0, "maxFailedIndexes": 1}
    meeting = {"name": "PET_RDZV_ENDPOINT", "value": "gang-0.tiphys-members:29500"}
    made["spec"]["template"]["spec"]["containers"][0]["env"].append(meeting)
    return made


def test_an_elastic_one_goes_on_without_one_that_it_can_spare(bench: Bench) -> None:
    # The others go on until it is known here that one has failed.
    waits = f"until grep -qs Failed {bench.cluster._path}/pods/*-2.json; do sleep 0.05; done"
    source = f'echo "$PET_LOCAL_ADDR $PET_RDZV_ENDPOINT"; [ "$RANK" != 2 ] || exit 3; {waits}'
    assert bench.run(flow(elastic(source))) == NodePhase.SUCCEEDED
    assert [pod.exit_code for pod in bench.cluster.attempt_pods()][::2] == [0, 3]
    first, *_ = bench.logs("fit")
    assert first.startswith("127.0.0.1 127.0.0.1:"), "of the nodes the one where they meet has the first address"


@pytest.mark.parametrize("fails", ["01", "12"])
def test_an_elastic_one_is_over_with_one_too_many(bench: Bench, fails: str) -> None:
    others = 'trap "exit 75" TERM; while :; do sleep 0.05; done'
    assert bench.run(flow(elastic(f"case {fails} in *$RANK*) exit 3;; esac; {others}"))) == NodePhase.FAILED
    message = bench.last("wf.fit").message
    assert message in {f"rank {rank}: main: Error (exit code 3)" for rank in fails}


def test_a_source_that_kubelet_would_write_is_the_script_of_each_member() -> None:
    volume = {
        "name": "tiphys-script",
        "downwardAPI": {"items": [{"fieldRef": {"fieldPath": "metadata.annotations['tiphys.dev/script']"}}]},
    }
    made = job("/tiphys/script/script", volumes=[volume, {"name": "scratch", "emptyDir": {}}])
    template = made["spec"]["template"]
    template["metadata"]["annotations"] = {"tiphys.dev/script": "print(1)"}
    mounts = [{"name": "tiphys-script", "mountPath": "/tiphys/script"}, {"name": "scratch", "mountPath": "/scratch"}]
    template["spec"]["containers"][0] |= {"command": ["python"], "volumeMounts": mounts}
    member = member_templates(made)[0]
    assert (member["script"]["source"], member["script"]["args"]) == ("print(1)", [])
    assert [mount["name"] for mount in member["script"]["volumeMounts"]] == ["scratch"]
    assert [one["name"] for one in member["volumes"]] == ["scratch"]


def test_paths_that_members_fetch_and_store_are_their_own() -> None:
    made = job("true")
    files = {"inputs": {"data": "/in/data"}, "outputs": {"artifacts/model": "/out/model"}}
    made["spec"]["template"]["spec"]["containers"][0]["env"].append(
        {"name": "TIPHYS_FILES", "value": json.dumps(files)}
    )
    paths = [artifact["path"] for artifact in member_templates(made)[0]["inputs"]["artifacts"]]
    assert paths == ["/in/data", "/out/model"]


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (job("true", labels={}), "cannot create a Job"),
        ({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}, "cannot create a ConfigMap"),
        (job("true", volumes=[{"name": "v", "hostPath": {"path": "/"}}]), "volumes.v: use persistentVolumeClaim"),
    ],
)
def test_an_object_that_cannot_run_locally_is_refused_by_name(manifest: Manifest, words: str) -> None:
    assert words in "\n".join(find_unsupported(flow(manifest)))


def test_an_object_without_a_name_is_no_gang() -> None:
    with pytest.raises(UsageError, match="nameless object"):
        member_templates({})
