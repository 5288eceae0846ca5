"""A training on several nodes as the object that Argo is to create.

| asked for | in the manifest |
|---|---|
| container, volumes, tolerations, service account, deadline, grace, … | as in a single pod of Argo |
| a value that only the run knows | filled in so that no quote or line break in it changes the manifest |
| a script | an annotation, which kubelet puts into the pod as a file |
| declared inputs and outputs | the program below one that fetches and stores them |
| what cannot be kept | refused by name |
"""

import json
import sys
from typing import Any

import pytest
from support.builders.authored_workflows import (
    STORE,
    artifact,
    by_name,
    output_parameter,
    parameters,
    step,
    train,
    workflow,
)
from support.fakes.resource_templates import filled_in
from tiphys_controller.plan.drift import find_drift

from hera_pipelines import Pipeline
from hera_pipelines import train as train_function
from hera_pipelines.compile import CompileOptions, SharedVolume, Spot, compile_workflow
from hera_pipelines.compile.output import record_code_version
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.drift_policy import DriftClass, DriftPolicy
from tiphys.protocol.gang import GangBackend, GangSpec, gang_name
from tiphys.protocol.operations import ADMIT_OUTPUTS, GANG_OUTPUTS
from tiphys.protocol.step_spec import CheckpointPolicy, GpuRequest, RetryPolicy

GI = 1024**3

ANSWERS = {
    **{name: f"<{name}>" for name in (*ADMIT_OUTPUTS, *GANG_OUTPUTS)},
    "tolerations": "",
    "node-requirements": '{"key": "kubernetes.io/hostname", "operator": "Exists"}',
    "input-keys": '{"data": "data/runs/a/outputs/prep/000000001/artifacts/data"}',
}
KNOWN = {
    **{f"inputs.parameters.tiphys-{name}": value for name, value in ANSWERS.items()},
    "workflow.uid": "uid-1",
    "node.name": 'digits.fit(0:lr:"a")(0).run',
    "inputs.parameters.learning-rate": 'a "quoted"\nvalue: {x}',
    "workflow.parameters.epochs": "3",
}


def gang(
    container: Manifest | None = None,
    backend: GangBackend = GangBackend.JOB,
    asked: Manifest | None = None,
    **fields: Any,
) -> Manifest:
    """A training template on four nodes."""
    wanted = {"gang": GangSpec(members=4, backend=backend), **(asked or {})}
    return train(container=container, asked=wanted, **fields)


def as_script(source: str) -> Manifest:
    """The same with a source instead of a program in the image."""
    template = gang({"source": source})
    template["script"] = template.pop("container")
    return template


def compiled(template: Manifest, **spec: Any) -> Manifest:
    return by_name(compile_workflow(workflow(template, **spec), CompileOptions(store=STORE)))


def made(template: Manifest, **spec: Any) -> Manifest:
    """What Argo hands to its executor."""
    return filled_in(compiled(template, **spec)["fit-run"]["resource"]["manifest"], KNOWN)


def pod(template: Manifest, **spec: Any) -> Manifest:
    found: Manifest = made(template, **spec)["spec"]["template"]
    return found


def env(container: Manifest) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


def test_a_gang_is_an_indexed_job_that_ends_as_a_whole() -> None:
    run = compiled(gang())["fit-run"]
    job = made(gang())
    assert (
        run["resource"].items()
        >= {
            "action": "apply",
            "setOwnerReference": True,
            "successCondition": "status.succeeded == 4",
            "failureCondition": "status.failed > 0",
        }.items()
    )
    assert (job["kind"], job["metadata"]["name"]) == ("Job", "<gang>")
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (0, "Failed")
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert not {"container", "podSpecPatch", "outputs"} & run.keys(), "they would be of Argo's own executor"


def test_an_elastic_one_has_as_many_members_as_admit_says_and_outlives_some_of_them() -> None:
    asked = {"gang": GangSpec(members=4, min_members=2), "gpu": GpuRequest(gpus=32, members=4, min_members=2)}
    found = compiled(gang(asked=asked))
    answered = {one["name"] for one in found["fit-admit"]["outputs"]["parameters"]}
    assert {"members", "spare"} < answered
    resource = found["fit-run"]["resource"]
    assert resource["successCondition"] == "status.conditions.0.type in (SuccessCriteriaMet, Complete)"
    assert resource["failureCondition"] == "status.conditions.0.type in (FailureTarget, Failed)"
    given = {"members": "3", "spare": "1", "gates": ""}
    answers = {**KNOWN, **{f"inputs.parameters.tiphys-{name}": value for name, value in given.items()}}
    job = filled_in(resource["manifest"], answers)
    spec = job["spec"]
    assert spec["template"]["spec"]["schedulingGates"] == []
    gated = filled_in(resource["manifest"], {**answers, "inputs.parameters.tiphys-gates": '{"name": "gate"}'})
    assert gated["spec"]["template"]["spec"]["schedulingGates"] == [{"name": "gate"}]
    assert (spec["completions"], spec["parallelism"], spec["maxFailedIndexes"]) == (3, 3, 1)
    assert (spec["backoffLimitPerIndex"], spec["podReplacementPolicy"]) == (0, "Failed")
    assert spec["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    assert "podFailurePolicy" not in spec, "a member that is lost must not end the others"
    container = spec["template"]["spec"]["containers"][0]
    assert container["command"][:4] == ["python", "-P", "-m", "tiphys.launch"], "it says where they meet"
    variables = env(container)
    expected = {
        "PET_NNODES": "2:4",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "<gang>-0.tiphys-members:29500",
        "PET_RDZV_ID": "<gang>",
        "PET_MAX_RESTARTS": "4",
        "PET_NPROC_PER_NODE": "8",
        "TIPHYS_ELASTIC": "2:4",
    }
    assert variables.items() >= expected.items()
    assert "NODE_RANK" in variables
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & variables.keys(), "they change, and torchrun tells them"


def test_a_gang_has_the_labels_by_which_plugin_and_controller_find_it() -> None:
    job = made(gang())
    found = {
        "tiphys.dev/run": "<run-id>",
        "tiphys.dev/step": "fit",
        "tiphys.dev/attempt": "<attempt>",
        "tiphys.dev/gang": "<gang>",
        "tiphys.dev/workflow-uid": "uid-1",
    }
    assert job["metadata"]["labels"] == found
    metadata = job["spec"]["template"]["metadata"]
    assert metadata["labels"] == {**found, "tiphys.dev/member": "true"}
    assert metadata["annotations"] == {"tiphys.dev/node": KNOWN["node.name"]}


def test_members_get_rank_and_address_as_torchrun_expects() -> None:
    container = pod(gang(asked={"gpu": GpuRequest(gpus=32, members=4)}))["spec"]["containers"][0]
    variables = env(container)
    first = dict.fromkeys(("MASTER_ADDR", "PET_MASTER_ADDR"), "<gang>-0.tiphys-members")
    assert variables.items() >= {**first, "PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "4"}.items()
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    assert [variables[name] for name in ("RANK", "NODE_RANK", "PET_NODE_RANK")] == [index] * 3
    assert variables.items() >= {"TIPHYS_ATTEMPT": "<attempt>", "TIPHYS_RUN": "<run-id>", "TIPHYS_STORE": STORE}.items()
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}, "of each node, not of all"


def test_variables_of_the_author_override_those_of_the_gang() -> None:
    container = pod(gang({"env": [{"name": "MASTER_PORT", "value": "1"}]}))["spec"]["containers"][0]
    assert env(container)["MASTER_PORT"] == "1", "of two variables of one name the later one holds"


def test_no_value_can_break_the_manifest() -> None:
    arguments = ["--lr={{inputs.parameters.learning-rate}}!", "{{workflow.parameters.epochs}}"]
    template = gang({"args": arguments}, inputs=parameters("learning-rate"))
    found = pod(template, arguments=parameters("epochs"))["spec"]["containers"][0]["args"]
    assert found == [f"--lr={KNOWN['inputs.parameters.learning-rate']}!", "3"]


def test_the_authors_own_expressions_are_kept() -> None:
    text = compiled(gang({"args": ["{{=sprig.upper(inputs.parameters['lr'])}}"]}, inputs=parameters("lr")))
    assert "{{=toJson(string(sprig.upper(inputs.parameters['lr'])))[1:-1]}}" in text["fit-run"]["resource"]["manifest"]


@pytest.mark.parametrize("backend", list(GangBackend))
def test_pods_are_placed_and_ended_like_single_ones(backend: GangBackend) -> None:
    own = {
        "nodeSelector": {"disk": "fast"},
        "securityContext": {"runAsUser": 7},
        "volumes": [{"name": "cache", "hostPath": {"path": "/cache"}}],
    }
    shared = {
        "serviceAccountName": "trainer",
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"disk": "slow"},
        "volumes": [{"name": "data", "emptyDir": {}}, {"name": "unused", "emptyDir": {}}],
    }
    mounts = [{"name": "data", "mountPath": "/data"}, {"name": "cache", "mountPath": "/cache"}]
    asked = {
        "spot": (Spot(label="spot"),),
        "grace_seconds": 120,
        "volume": SharedVolume(claim="shared"),
        "checkpoints": CheckpointPolicy(),
    }
    job = made(gang({"volumeMounts": mounts}, backend, asked, **own), **shared)
    spec, container = placed(job)
    assert spec["terminationGracePeriodSeconds"] == 120
    assert spec["serviceAccountName"] == "trainer"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["nodeSelector"] == {"disk": "fast", "spot": "true"}, "the template's own goes before the Workflow's"
    assert spec["tolerations"] == [{"key": "spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}]
    assert spec["securityContext"] == {"runAsUser": 7}
    assert [volume["name"] for volume in spec["volumes"]] == ["cache", "tiphys-checkpoints", "data"]
    assert [mount["name"] for mount in container["volumeMounts"]] == ["data", "cache", "tiphys-checkpoints"]
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms == [{"matchExpressions": [json.loads(ANSWERS["node-requirements"])]}]


def placed(job: Manifest) -> tuple[Manifest, Manifest]:
    """Pod spec and container of the members, wherever a kind keeps them."""
    spec = job["spec"]
    if job["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    if job["kind"] == "TrainJob":
        patch = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
        spec = patch["template"]["spec"]
    pod = spec["template"]
    assert pod["metadata"]["labels"]["tiphys.dev/attempt"] == "<attempt>"
    return pod["spec"], pod["spec"]["containers"][0]


def test_node_requirements_are_added_to_every_alternative_of_the_author() -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}, {}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    affinity = {"nodeAffinity": required, "podAntiAffinity": {"x": 1}}
    found = pod(gang(affinity=affinity))["spec"]["affinity"]
    hosts = json.loads(ANSWERS["node-requirements"])
    assert found["podAntiAffinity"] == {"x": 1}
    assert found["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] == [
        {"matchExpressions": [{"key": "zone", "operator": "Exists"}, hosts]},
        {"matchExpressions": [hosts]},
    ]


def test_settings_of_a_step_win_over_those_of_its_workflow() -> None:
    def terms(zone: str) -> Manifest:
        required = {"nodeSelectorTerms": [{"matchExpressions": [{"key": zone, "operator": "Exists"}]}]}
        return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}

    own = {
        "affinity": terms("of-step"),
        "automountServiceAccountToken": True,
        "priorityClassName": "of-step",
        "nodeSelector": {"disk": "of-step"},
    }
    of_all = {
        "templateDefaults": {"nodeSelector": {"disk": "of-workflow"}},
        "podMetadata": {
            "labels": {"team": "workflow", "cost": "é", "tiphys.dev/member": "false"},
            "annotations": {"why": "workflow", "sidecar.istio.io/inject": "false"},
        },
        "affinity": terms("of-workflow"),
        "automountServiceAccountToken": False,
        "priorityClassName": "of-workflow",
        "schedulerName": "volcano",
    }
    for given, zone, team in [(own, "of-step", "step"), ({}, "of-workflow", "workflow")]:
        template = gang(**given)
        if given:
            template["metadata"].setdefault("labels", {})["team"] = "step"
            template["metadata"]["annotations"]["why"] = "step"
        found = pod(template, **of_all)
        labels, annotations = found["metadata"]["labels"], found["metadata"]["annotations"]
        assert (labels["team"], labels["cost"], annotations["why"]) == (team, "é", team)
        assert labels["tiphys.dev/gang"] == "<gang>"
        assert "false" not in labels.values()
        assert annotations["sidecar.istio.io/inject"] == "false"
        spec = found["spec"]
        assert f'"key": "{zone}"' in json.dumps(spec["affinity"])
        assert spec["automountServiceAccountToken"] is (team == "step")
        assert (spec["priorityClassName"], spec["schedulerName"]) == (zone, "volcano")
        assert spec["nodeSelector"] == {"disk": zone}


def test_a_deadline_is_that_of_each_pod_and_distinct_from_a_failure() -> None:
    found = pod(gang(asked={"deadline_seconds": 3600}))
    assert found["spec"]["activeDeadlineSeconds"] == 3600
    assert "activeDeadlineSeconds" not in compiled(gang(asked={"deadline_seconds": 3600}))["fit-run"]


def test_a_function_reaches_the_pod_as_a_file() -> None:
    @train_function(image="python:3.12", nodes=2)
    def fit(note: str) -> None:
        sys.stdout.write(note)

    with Pipeline("digits", store=STORE) as pipeline:
        fit(note="x")
    run = by_name(pipeline.compile())["fit-run"]
    text = run["resource"]["manifest"]
    assert "{{=toJson(string(toJson(inputs.parameters['note'])))[1:-1]}}" in text
    given = {**KNOWN, "toJson(inputs.parameters.note)": '"x"'}
    found = filled_in(text, given)["spec"]["template"]
    [container] = found["spec"]["containers"]
    [volume] = found["spec"]["volumes"]
    assert "def fit(note: str) -> None:" in found["metadata"]["annotations"]["tiphys.dev/script"]
    assert container["command"] + container["args"] == [
        *("python", "-P", "-m", "tiphys.launch", "--"),
        *("python", "/tiphys/script/script"),
    ]
    assert volume["downwardAPI"]["items"][0]["fieldRef"] == {"fieldPath": "metadata.annotations['tiphys.dev/script']"}


def test_a_program_with_files_is_started_by_one_that_fetches_and_stores_them() -> None:
    template = gang(
        {"args": ["{{inputs.artifacts.data.path}}"]},
        inputs={"artifacts": [{"name": "data", "path": "/in/data"}]},
        outputs={"artifacts": [artifact("model")], "parameters": [output_parameter("loss")]},
    )
    [container] = pod(template)["spec"]["containers"]
    assert container["command"] == ["python", "-P", "-m", "tiphys.launch", "--", "fit"]
    assert container["args"] == ["/in/data"]
    assert json.loads(env(container)["TIPHYS_FILES"]) == {
        "inputs": {"data": "/in/data"},
        "outputs": {"artifacts/model": "/tmp/model", "parameters/loss": "/tmp/loss"},
    }
    assert json.loads(env(container)["TIPHYS_INPUT_KEYS"]) == json.loads(ANSWERS["input-keys"])
    assert "TIPHYS_FILES" not in env(pod(gang())["spec"]["containers"][0])
    templates = compiled(template)
    assert "artifacts" not in templates["fit-run"]["inputs"], "Argo would load them into a pod of its own"


def test_the_plugin_reads_that_it_is_a_gang() -> None:
    manifest = compile_workflow(workflow(gang()), CompileOptions(store=STORE))
    assert CompiledPipeline.from_manifest(manifest).step("fit").gang == GangSpec(members=4)
    single = compile_workflow(workflow(train()), CompileOptions(store=STORE))
    assert "gang" not in json.dumps(single)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (step("fit", asked={"gang": GangSpec(members=2)}), "use @train"),
        (gang(asked={"gpu": GpuRequest(gpus=8, members=2)}), "its GPUs are for 2 pods and it has 4"),
        (gang(sidecars=[{"name": "s"}]), "sidecars is not supported on several nodes"),
        (gang({"command": ["/opt/bin/tiphys-exec", "--dir", "/c"]}), "use tiphys.checkpoint"),
        (gang({"command": None}, outputs={"artifacts": [artifact("model")]}), "add command="),
        (as_script("x" * 100_001), "longer than the 100000 bytes"),
        (gang({"args": ["{{inputs.parameters}}"]}), "{{inputs.parameters}} cannot be handed to several pods"),
        (gang({"lifecycle": {}}, GangBackend.TRAINJOB), "a TrainJob has no place for lifecycle"),
        (gang({"envFrom": [{"secretRef": {"name": "own"}}]}, GangBackend.TRAINJOB), "no place for envFrom"),
        (
            gang(backend=GangBackend.TRAINJOB, asked={"deadline_seconds": 60}),
            "a TrainJob has no place for activeDeadlineSeconds",
        ),
        (gang(asked={"retry": RetryPolicy(memory_ceiling_bytes=64 * GI)}), "memory_ceiling is for a container with"),
        (
            gang(
                asked={"retry": RetryPolicy(on_demand_after=2), "spot": (Spot(label="spot"),)},
                nodeSelector={"spot": "true"},
            ),
            "its node selector names spot",
        ),
    ],
)
def test_a_setting_that_several_pods_cannot_keep_is_refused_by_name(template: Manifest, sentence: str) -> None:
    with pytest.raises(UsageError, match="step 'fit'") as refused:
        compiled(template)
    assert sentence in str(refused.value)


def test_a_claim_that_the_workflow_makes_is_refused() -> None:
    template = gang({"volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]})
    with pytest.raises(UsageError, match="claim 'scratch' is made by the Workflow"):
        compiled(template, volumeClaimTemplates=[{"metadata": {"name": "scratch"}}])


@pytest.mark.parametrize(
    ("run", "step_id"), [("digits-7xk2p", "fit"), ("a" * 63, "b" * 63), ("2026.run", "sweep.0a1b"), ("-", "1")]
)
def test_the_name_of_an_attempts_object_can_be_a_host_name_with_a_rank_behind_it(run: str, step_id: str) -> None:
    name = gang_name(run, step_id, 1234)
    assert name == gang_name(run, step_id, 1234)
    assert len(f"{name}-node-0-99999") <= 63
    assert name[0].isalpha()
    assert all(letter.isalnum() or letter == "-" for letter in name)
    assert name not in (gang_name(run, step_id, 1235), gang_name(f"{run}x", step_id, 1234))


@pytest.mark.parametrize("own", [[], [{"key": "mine", "operator": "Exists"}]])
@pytest.mark.parametrize("admitted", ["", '{"key": "a"}', '{"key": "a"}, {"key": "b"}'])
def test_pods_tolerate_what_admit_says_beside_the_authors_own(own, admitted):
    text = compiled(gang(tolerations=own))["fit-run"]["resource"]["manifest"]
    job = filled_in(text, {**KNOWN, "inputs.parameters.tiphys-tolerations": admitted})
    assert job["spec"]["template"]["spec"].get("tolerations", []) == [*json.loads(f"[{admitted}]"), *own]


@pytest.mark.parametrize(("kinds", "use"), [((), "no"), (("a",), "only"), (("a", "b"), "allowed")])
def test_the_request_says_how_spot_nodes_may_be_used(kinds, use):
    asked = {"gpu": GpuRequest(gpus=4, members=4), "spot": tuple(Spot(label=kind) for kind in kinds)}
    document = compile_workflow(workflow(gang(asked=asked)), CompileOptions(store=STORE))
    assert CompiledPipeline.from_manifest(document).step("fit").gpu.spot == use


@pytest.mark.parametrize("backend", list(GangBackend))
def test_memory_that_may_grow_is_what_admit_answers(backend: GangBackend) -> None:
    resources = {"requests": {"memory": "4Gi", "cpu": "2"}, "limits": {"memory": "8Gi"}}
    ladder = {"retry": RetryPolicy(memory_ceiling_bytes=64 * GI)}
    templates = compiled(gang({"resources": resources}, backend, asked=ladder))
    declared = {one["name"]: one["valueFrom"]["default"] for one in templates["fit-admit"]["outputs"]["parameters"]}
    assert (declared["memory-request"], declared["memory-limit"], declared["gang"]) == ("4Gi", "8Gi", "")

    given = {"inputs.parameters.tiphys-memory-request": "6Gi", "inputs.parameters.tiphys-memory-limit": "12Gi"}
    job = filled_in(templates["fit-run"]["resource"]["manifest"], {**KNOWN, **given})
    of_trainer = backend is GangBackend.TRAINJOB
    found = job["spec"]["trainer"]["resourcesPerNode"] if of_trainer else placed(job)[1]["resources"]
    assert (found["requests"], found["limits"]["memory"]) == ({"memory": "6Gi", "cpu": "2"}, "12Gi")
    # Where nobody asked for it, and where nothing was declared, nothing is answered.
    for other in (gang({"resources": resources}), gang({"resources": {"limits": {"memory": "8Gi"}}}, asked=ladder)):
        assert "memory-request" not in json.dumps(compiled(other))


def test_members_of_a_train_job_get_the_rank_that_its_trainer_does_not_set() -> None:
    trainer = made(gang({"env": [{"name": "MASTER_PORT", "value": "1"}]}, GangBackend.TRAINJOB))["spec"]["trainer"]
    names = [variable["name"] for variable in trainer["env"]]
    assert len(names) == len(set(names)), "Kubernetes refuses a second variable of one name"
    assert not [name for name in names if name.startswith("PET_")], "the trainer refuses those that it sets itself"
    variables = env(trainer)
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    assert [variables[name] for name in ("RANK", "NODE_RANK")] == [index] * 2
    first = {"MASTER_ADDR": "<gang>-node-0-0.<gang>", "MASTER_PORT": "1", "WORLD_SIZE": "4"}
    assert variables.items() >= first.items()
    assert trainer["numProcPerNode"] == 1, "the trainer would start one for each CPU"


@pytest.mark.parametrize(("retry", "kept"), [(RetryPolicy(), True), (RetryPolicy(on_demand_after=2), False)])
def test_a_gang_that_may_leave_spot_nodes_has_no_selector_for_them(retry: RetryPolicy, kept: bool) -> None:
    template = gang(asked={"spot": (Spot(label="spot"),), "retry": retry}, nodeSelector={"disk": "fast"})
    selector = pod(template)["spec"]["nodeSelector"]
    assert selector == {"disk": "fast", **({"spot": "true"} if kept else {})}


@pytest.mark.parametrize("backend", GangBackend)
def test_members_get_the_commit_of_the_code_once(backend: GangBackend) -> None:
    manifest = compile_workflow(workflow(gang(backend=backend)), CompileOptions(store=STORE))
    text_before = by_name(manifest)["fit-run"]["resource"]["manifest"]
    for _ in range(2):
        record_code_version(manifest, "c0ffee-dirty")
    job = filled_in(by_name(manifest)["fit-run"]["resource"]["manifest"], KNOWN)
    [variables] = find_env(job)
    commit = {"name": "TIPHYS_GIT_COMMIT", "value": "c0ffee-dirty"}
    assert [variable for variable in variables if variable["name"] == "TIPHYS_GIT_COMMIT"] == [commit]
    variables.remove(commit)
    assert [variables] == find_env(filled_in(text_before, KNOWN))


def test_members_of_another_commit_are_no_other_template() -> None:
    def pipeline(commit: str, image: str = "fit:1") -> CompiledPipeline:
        manifest = compile_workflow(workflow(gang({"image": image})), CompileOptions(store=STORE))
        record_code_version(manifest, commit)
        return CompiledPipeline.from_manifest(manifest)

    found = find_drift(pipeline("c0ffee"), pipeline("badcafe"), DriftPolicy())
    assert [(finding.drift, finding.place) for finding in found] == [(DriftClass.CODE, "commit")]
    found = find_drift(pipeline("c0ffee"), pipeline("badcafe", "fit:2"), DriftPolicy())
    assert "manifest" in [finding.place for finding in found]


def find_env(part: Any) -> list[list[Any]]:
    """All lists of variables in a document."""
    parts = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return [found for name, value in parts for found in ([value] if name == "env" else find_env(value))]


def test_members_know_what_their_restarts_need() -> None:
    asked = {"retry": RetryPolicy(spare=True), "checkpoints": CheckpointPolicy()}
    variables = env(pod(gang(asked=asked))["spec"]["containers"][0])
    assert variables["TIPHYS_RESTART_CAUSES"] == "hang,infrastructure,unknown"
    assert (variables["TIPHYS_MEMBERS"], variables["TIPHYS_SPARE"]) == ("4", "on")
