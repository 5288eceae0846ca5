"""What a gated container finds: variables, GPUs, nodes, volume, deadline and grace.

`test_ungated_template.py` has what a container without a gate finds.
"""

import json
from typing import Any

import pytest
from support.builders.authored_workflows import (
    STORE,
    artifact,
    by_name,
    gated,
    output_parameter,
    parameters,
    train,
    workflow,
)

from hera_pipelines import AKS_SPOT, GKE_SPOT, KARPENTER_SPOT
from hera_pipelines.compile import CompileOptions, SharedVolume, compile_workflow
from tiphys.checkpoint.settings import CheckpointSettings, IntervalBounds, SaveInterval
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.step_spec import BestCheckpoints, CheckpointPolicy, GpuRequest, RetentionPolicy

GIVEN = {
    "TIPHYS_STORE": STORE,
    "TIPHYS_RUN": "digits-1",
    "TIPHYS_STEP": "fit",
    "TIPHYS_ATTEMPT": "1",
    "TIPHYS_LINEAGE": "digits-1/fit",
}


def run(template: Manifest, store: str = STORE) -> Manifest:
    made = by_name(compile_workflow(workflow(template), CompileOptions(store=store)))
    return made[f"{template['name']}-run"]


def env(template: Manifest, store: str = STORE) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in run(template, store)["container"]["env"]}


def test_a_training_program_learns_where_it_stands() -> None:
    policy = CheckpointPolicy(every=100, every_unit="steps", keep_last=None)

    assert env(train(asked={"checkpoints": policy, "grace_seconds": 120})) == {
        "TIPHYS_STORE": STORE,
        "TIPHYS_RUN": "{{inputs.parameters.tiphys-run-id}}",
        "TIPHYS_STEP": "fit",
        "TIPHYS_ATTEMPT": "{{inputs.parameters.tiphys-attempt}}",
        "TIPHYS_GRACE_SECONDS": "120",
        "TIPHYS_LINEAGE": "{{inputs.parameters.tiphys-lineage}}",
        "TIPHYS_RESUME_FROM": "{{inputs.parameters.tiphys-resume-from}}",
        "CHECKPOINT_URI": "{{inputs.parameters.tiphys-checkpoint-uri}}",
        "TIPHYS_CHECKPOINT_STORE": STORE,
        "TIPHYS_SAVE_EVERY": "100 steps",
        "TIPHYS_KEEP_LAST": "all",
        "TIPHYS_IMAGE": "fit:1",
        "TIPHYS_RESTART_CAUSES": "hang,infrastructure,unknown",
    }


def test_the_program_learns_how_its_saves_go_on_behind_the_training() -> None:
    rare = {"TIPHYS_ASYNCHRONOUS", "TIPHYS_WHEN_BUSY", "TIPHYS_CACHE", "TIPHYS_NEAR_COPY"}
    assert not rare & set(env(train(asked={"checkpoints": CheckpointPolicy()})))
    policy = CheckpointPolicy(asynchronous=False, when_busy="queue", cache="/var/cache/tiphys", near_copy=False)
    given = env(train(asked={"checkpoints": policy}))
    assert {name: given[name] for name in rare} == {
        "TIPHYS_ASYNCHRONOUS": "false",
        "TIPHYS_WHEN_BUSY": "queue",
        "TIPHYS_CACHE": "/var/cache/tiphys",
        "TIPHYS_NEAR_COPY": "false",
    }


def test_the_program_learns_where_its_metrics_are_to_be_seen() -> None:
    assert env(train(asked={"checkpoints": CheckpointPolicy(metrics="port:9464")}))["TIPHYS_METRICS"] == "port:9464"


def test_bounds_of_an_interval_arrive_as_they_were_given() -> None:
    compiled = env(train(asked={"checkpoints": CheckpointPolicy(every_bounds=(90, 2_000_000))}))["TIPHYS_SAVE_EVERY"]
    assert compiled == "auto:90s..2e+06s"
    found = CheckpointSettings.from_environment({**GIVEN, "TIPHYS_SAVE_EVERY": compiled})
    assert found is not None
    assert found.save_every == SaveInterval(600, "seconds", auto=IntervalBounds(90, 2_000_000))


def test_retention_variables_are_set_only_for_a_policy_that_has_them() -> None:
    best = BestCheckpoints(metric="loss", order="min", count=2)
    policy = CheckpointPolicy(keep_last=2, keep_every=1000, keep_best=best, delete_after_seconds=90)

    variables = env(train(asked={"checkpoints": policy}))
    plain = env(train(asked={"checkpoints": CheckpointPolicy(keep_last=2)}))

    assert {name: value for name, value in variables.items() if name not in plain} == {
        "TIPHYS_KEEP_EVERY": "1000 steps",
        "TIPHYS_KEEP_BEST": "loss:min:2",
        "TIPHYS_DELETE_AFTER_SECONDS": "90",
    }
    answers = {"TIPHYS_RUN": "a", "TIPHYS_STEP": "fit", "TIPHYS_ATTEMPT": "1", "TIPHYS_RESUME_FROM": ""}
    settings = CheckpointSettings.from_environment({**variables, **answers})
    assert settings is not None
    assert settings.keep == policy.retention == RetentionPolicy(last=2, every_steps=1000, best=best, delay_seconds=90)


@pytest.mark.parametrize("template", [gated(), train(asked={"checkpoints": None, "gpu": GpuRequest(gpus=1)})])
def test_a_program_without_checkpoints_hears_of_none(template: Manifest) -> None:
    assert set(env(template)) == {
        "TIPHYS_STORE",
        "TIPHYS_RUN",
        "TIPHYS_STEP",
        "TIPHYS_ATTEMPT",
        "TIPHYS_GRACE_SECONDS",
    }
    inputs = {p["name"] for p in run(template)["inputs"]["parameters"]}
    assert not inputs & {"tiphys-lineage", "tiphys-resume-from", "tiphys-checkpoint-uri"}


def test_every_variable_that_names_an_answer_has_an_input() -> None:
    template = run(train())

    used = {e["value"] for e in template["container"]["env"] if e["value"].startswith("{{")}
    declared = {f"{{{{inputs.parameters.{p['name']}}}}}" for p in template["inputs"]["parameters"]}
    assert used <= declared


def test_the_save_interval_is_written_as_the_trainer_reads_it() -> None:
    assert env(train(asked={"checkpoints": CheckpointPolicy(every=90)}))["TIPHYS_SAVE_EVERY"] == "90s"


def test_paths_of_inputs_and_outputs_are_in_the_environment() -> None:
    found = env(
        gated(
            inputs={"artifacts": [{"name": "raw-data", "path": "/in"}]},
            outputs={"parameters": [output_parameter("val-loss")], "artifacts": [artifact("model")]},
        )
    )

    assert found["TIPHYS_INPUT_RAW_DATA"] == "/in"
    assert found["TIPHYS_OUTPUT_VAL_LOSS"] == "/tmp/val-loss"
    assert found["TIPHYS_OUTPUT_MODEL"] == "/tmp/model"


def test_a_program_that_is_not_root_can_read_its_input_artifacts() -> None:
    [artifact] = run(gated(inputs={"artifacts": [{"name": "data", "path": "/in"}]}))["inputs"]["artifacts"]
    assert (artifact["mode"], artifact["recurseMode"]) == (0o755, True)


def test_a_mode_that_the_author_chose_for_an_input_artifact_stays() -> None:
    [artifact] = run(gated(inputs={"artifacts": [{"name": "data", "path": "/in", "mode": 0o600}]}))["inputs"][
        "artifacts"
    ]
    assert (artifact["mode"], "recurseMode" in artifact) == (0o600, False)


def test_the_authors_variables_come_first() -> None:
    template = run(gated(container={"env": [{"name": "SEED", "value": "1"}]}))

    assert template["container"]["env"][0] == {"name": "SEED", "value": "1"}


def test_without_a_store_the_program_hears_of_none() -> None:
    assert "TIPHYS_STORE" not in env(gated(), store="")


def test_a_script_is_gated_like_a_container() -> None:
    template = gated()
    template["script"] = {**template.pop("container"), "source": "print(1)"}

    made = run(template)

    assert made["script"]["source"] == "print(1)"
    assert "TIPHYS_RUN" in {entry["name"] for entry in made["script"]["env"]}


def test_gpus_become_a_limit_a_selector_and_a_least_memory() -> None:
    made = run(train(asked={"gpu": GpuRequest(gpus=4, gpu_type="A100", min_gpu_memory_mb=80_000)}))

    assert made["container"]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert made["nodeSelector"] == {"nvidia.com/gpu.product": "A100"}
    required = made["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"] == [
        {"matchExpressions": [{"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": ["79999"]}]}
    ]


def test_several_types_become_a_choice_of_nodes() -> None:
    made = run(train(asked={"gpu": GpuRequest(gpus=4, gpu_types=("H100", "A100"))}))

    [term] = made["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    choice = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["H100", "A100"]}
    assert term == {"matchExpressions": [choice]}
    assert "nodeSelector" not in made


def test_the_least_memory_narrows_every_alternative_of_the_author() -> None:
    zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in ("a", "b")]
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": zones}},
        "podAffinity": {"mine": True},
    }

    made = run(train(asked={"gpu": GpuRequest(gpus=1, min_gpu_memory_mb=1000)}, affinity=affinity))["affinity"]

    terms = made["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [[e["key"] for e in term["matchExpressions"]] for term in terms] == [["zone", "nvidia.com/gpu.memory"]] * 2
    assert made["podAffinity"] == {"mine": True}


def test_a_spot_label_is_selected_and_tolerated() -> None:
    made = run(train(asked={"spot": (GKE_SPOT,)}, nodeSelector={"disk": "ssd"}, tolerations=[{"key": "mine"}]))

    assert made["nodeSelector"] == {"disk": "ssd", "cloud.google.com/gke-spot": "true"}
    assert made["tolerations"] == [
        {"key": "mine"},
        {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"},
    ]


def test_several_kinds_of_spot_nodes_are_tolerated_only() -> None:
    made = run(train(asked={"spot": (GKE_SPOT, AKS_SPOT)}))

    assert "nodeSelector" not in made
    assert [t["key"] for t in made["tolerations"]] == [GKE_SPOT.label, AKS_SPOT.label]


def test_a_spot_label_without_a_taint_is_selected_only() -> None:
    made = run(train(asked={"spot": (KARPENTER_SPOT,)}))

    assert made["nodeSelector"] == {"karpenter.sh/capacity-type": "spot"}
    assert "tolerations" not in made


def test_a_shared_volume_is_mounted_and_becomes_the_checkpoint_store() -> None:
    template = train(
        asked={"volume": SharedVolume(claim="ckpt", mount_path="/mnt/ckpt")},
        volumes=[{"name": "mine"}],
        container={"volumeMounts": [{"name": "mine", "mountPath": "/mine"}]},
    )

    made = run(template)

    assert made["volumes"] == [
        {"name": "mine"},
        {"name": "tiphys-checkpoints", "persistentVolumeClaim": {"claimName": "ckpt"}},
    ]
    assert made["container"]["volumeMounts"][1] == {"name": "tiphys-checkpoints", "mountPath": "/mnt/ckpt"}
    assert env(template)["TIPHYS_CHECKPOINT_STORE"] == "file:///mnt/ckpt"
    assert env(template)["TIPHYS_STORE"] == STORE


def test_fields_of_the_author_stay_beside_what_the_step_asks_for() -> None:
    container = {
        "resources": {"limits": {"memory": "64Gi"}, "requests": {"cpu": 4}},
        "ports": [{"name": "tensorboard", "containerPort": 6006}],
    }
    asked = {"gpu": GpuRequest(gpus=4, gpu_type="A100"), "checkpoints": CheckpointPolicy(metrics="port:9464")}

    made = run(train(container=container, asked=asked, nodeSelector={"disk": "ssd"}))

    limits = {"memory": "64Gi", "nvidia.com/gpu": "4"}
    assert made["container"]["resources"] == {"limits": limits, "requests": {"cpu": 4}}
    assert made["nodeSelector"] == {"disk": "ssd", "nvidia.com/gpu.product": "A100"}
    assert [port["containerPort"] for port in made["container"]["ports"]] == [6006, 9464]


def test_launcher_of_another_image_comes_beside_volumes_and_init_containers_of_the_author() -> None:
    own = {"name": "data", "mountPath": "/data"}
    made = run(
        train(
            asked={"runtime_image": "tiphys:1"},
            container={"volumeMounts": [own]},
            volumes=[{"name": "data"}],
            initContainers=[{"name": "fetch", "image": "fetch:1"}],
        )
    )

    runtime = {"name": "tiphys-runtime", "mountPath": "/tiphys-runtime"}
    assert made["volumes"] == [{"name": "data"}, {"name": "tiphys-runtime", "emptyDir": {}}]
    assert [(one["name"], one["image"]) for one in made["initContainers"]] == [
        ("tiphys-runtime", "tiphys:1"),
        ("fetch", "fetch:1"),
    ]
    assert made["initContainers"][0]["volumeMounts"] == [runtime]
    assert made["container"]["volumeMounts"] == [own, {**runtime, "readOnly": True}]
    assert (made["container"]["image"], made["container"]["command"][-2:]) == ("fit:1", ["--", "fit"])


def test_the_deadline_and_a_steps_grace_reach_its_pod() -> None:
    made = run(gated(asked={"deadline_seconds": 3600, "grace_seconds": 45.2}))

    assert made["activeDeadlineSeconds"] == 3600
    assert json.loads(made["podSpecPatch"]) == {"terminationGracePeriodSeconds": 46}


@pytest.mark.parametrize(
    ("asked", "own", "seconds"),
    [
        ({"deadline_seconds": 3600, "grace_seconds": 45.2}, {}, 3646),
        ({}, {"activeDeadlineSeconds": 600}, 630),
        ({}, {"activeDeadlineSeconds": "{{inputs.parameters.limit}}", "inputs": parameters("limit")}, None),
        ({}, {}, None),
    ],
)
def test_the_ledger_learns_how_long_gpus_are_held_at_most(asked: Manifest, own: Manifest, seconds: int | None) -> None:
    template = train(asked={"checkpoints": None, "gpu": GpuRequest(gpus=1), **asked}, **own)
    compiled = compile_workflow(workflow(template), CompileOptions(store=STORE))

    gpu = CompiledPipeline.from_manifest(compiled).step("fit").gpu
    assert gpu is not None
    assert gpu.seconds == seconds


@pytest.mark.parametrize("field", ["podSpecPatch", "activeDeadlineSeconds", "nodeSelector", "tolerations", "volumes"])
def test_field_that_was_not_asked_for_is_absent(field: str) -> None:
    assert field not in run(gated())


@pytest.mark.parametrize(
    "kept",
    [
        {"container": {"lifecycle": {"preStop": {"exec": {"command": ["save"]}}}}},
        {"sidecars": [{"name": "proxy", "image": "proxy:1"}]},
        {"serviceAccountName": "trainer"},
        {"synchronization": {"mutexes": [{"name": "one"}]}},
    ],
    ids=lambda kept: next(iter(kept)),
)
def test_pod_settings_of_the_author_are_kept(kept: dict[str, Any]) -> None:
    made = run(gated(**kept))

    for field, value in kept.items():
        assert made[field] | value == made[field] if isinstance(value, dict) else made[field] == value


def test_a_training_program_gets_the_credentials_of_the_store_below_what_its_author_gave() -> None:
    given = {"configMapRef": {"name": "settings"}}

    sources = run(train(container={"envFrom": [given]}))["container"]["envFrom"]

    assert sources == [{"secretRef": {"name": "tiphys-store", "optional": True}}, given]


def test_a_step_writes_nothing_itself_and_gets_no_credentials() -> None:
    assert "envFrom" not in run(gated())["container"]


@pytest.mark.parametrize(
    ("metrics", "ports"),
    [
        ("port:9464", [{"name": "tiphys-metrics", "containerPort": 9464}]),
        ("port:0.0.0.0:9464", [{"name": "tiphys-metrics", "containerPort": 9464}]),
        ("port:127.0.0.1:9464", None),
        ("port:[::1]:9464", None),
        ("port:localhost:9464", None),
        ("", None),
    ],
)
def test_the_port_of_the_metrics_has_a_name_by_which_a_scraper_finds_it(metrics: str, ports: list[Manifest]) -> None:
    made = run(train(asked={"checkpoints": CheckpointPolicy(metrics=metrics)}))
    assert made["container"].get("ports") == ports
