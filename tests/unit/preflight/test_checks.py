"""Each check of `tiphys preflight`: what is seen, and how bad it is; each with its negative twin.

| seen | state |
|---|---|
| an image without a digest, by tag or latest | warning |
| a budget above 3, or a retryStrategy without a cause above 3, for an error that comes again | warning |
| most, some measured saves longer than the grace period | failed, warning |
| a deadline of the Workflow beside requests for GPUs | warning |
| a Workflow above, near the limit of one object | warning |
| a schedule that Argo refuses | failed |
| a request for GPUs that the queues can never serve; a stopped queue | failed, warning |
| a claim that does not exist; ReadWriteOnce for a gang, for a fan-out | failed; failed, warning |
| a Secret or ConfigMap that the pods need and that does not exist | failed |
| a right or a kind that a step needs and does not have | failed |
| what fails in `tiphys doctor --cluster` and this Workflow rests on | failed |
| another store than that of the services; a store that breaks a promise | failed |
| what could not be read | unknown, which stops nothing |
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.builders import ledger
from support.builders.authored_workflows import plain, step, task, train
from support.builders.preflights import (
    CLUSTER,
    HEALTHY,
    NAMESPACE,
    in_namespace,
    plugin,
    states,
    subject_of,
    with_cluster,
)
from tiphys_controller.doctor import Finding, UnknownValue, failed_checks
from tiphys_controller.doctor.check import failed, warning
from tiphys_controller.doctor.observed import DeploymentSearch, KueueObservation, Permission, PodReadiness

from hera_pipelines.preflight import PreflightObservation, PreflightSubject
from hera_pipelines.preflight import run_preflight_checks as run
from hera_pipelines.preflight.checks_objects import find_accounts, find_named_objects, find_needed_rights
from hera_pipelines.preflight.observation import ObservedRights, ReferencedObjects, SaveTimes
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.gang import GangSpec
from tiphys.protocol.step_spec import CheckpointPolicy, GpuRequest, RetryPolicy

DIGEST = f"ghcr.io/acme/fit@sha256:{'a' * 64}"
GPU = {"resources": {"limits": {"nvidia.com/gpu": 2}}}
FORBIDDEN = UnknownValue("the API server refused: it is forbidden")


def found(check: str, subject: PreflightSubject, observed: PreflightObservation = HEALTHY) -> list[Finding]:
    return [one for one in run(subject, observed) if one.check == check]


def only(check: str, subject: PreflightSubject, observed: PreflightObservation = HEALTHY) -> Finding:
    [one] = found(check, subject, observed)
    return one


def test_a_sound_pipeline_on_a_sound_cluster_has_no_warning() -> None:
    subject = subject_of(
        train(container={"image": DIGEST}, asked={"checkpoints": CheckpointPolicy(save_seconds=5)}),
        step(container={"image": DIGEST}),
    )
    findings = run(subject, HEALTHY)
    assert set(states(findings).values()) == {"ok"}
    assert not failed_checks(findings)
    assert {"images", "retries", "grace", "size", "cluster", "store", "submit"} <= states(findings).keys()


@pytest.mark.parametrize(
    ("image", "state", "words"),
    [
        (DIGEST, "ok", "pinned by digest"),
        ("fit:1.4", "warning", "has the tag 1.4"),
        ("registry:5000/fit", "warning", "has no tag"),
        ("fit:latest", "warning", "has the tag latest"),
        (f"fit@sha256:{'a' * 63}", "failed", "has a digest that is none"),
        ("{{inputs.parameters.image}}", "unknown", "known only when the step runs"),
    ],
)
def test_an_image_is_pinned_by_digest(image: str, state: str, words: str) -> None:
    fields: dict[str, Any] = {"inputs": {"parameters": [{"name": "image"}]}} if "{{" in image else {}
    one = only("images", subject_of(step(container={"image": image}, **fields)))
    assert (one.state.value, words in one.sentence) == (state, True), one
    assert bool(one.remedy) == (state in ("warning", "failed"))


def test_an_image_is_often_a_parameter_of_the_workflow() -> None:
    arguments = {"parameters": [{"name": "image", "value": DIGEST}]}
    subject = subject_of(step(container={"image": "{{workflow.parameters.image}}"}), arguments=arguments)
    assert only("images", subject).state == "ok"


def test_an_image_of_several_steps_is_one_line() -> None:
    one = only("images", subject_of(step("a", container={"image": "x:1"}), step("b", container={"image": "x:1"})))
    assert "of a, b" in one.sentence
    assert one.place == ""


def gang(**container: Any) -> Manifest:
    asked = {"gpu": GpuRequest(gpus=16, members=2), "gang": GangSpec(members=2)}
    return train(container={"image": DIGEST, **container}, asked=asked)


def replicas(*images: str) -> Manifest:
    roles = {
        f"Role{number}": {"replicas": 2, "template": {"spec": {"containers": [{"name": "pytorch", "image": image}]}}}
        for number, image in enumerate(images)
    }
    body = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "spec": {"pytorchReplicaSpecs": roles}}
    return {"name": "torch", "resource": {"action": "create", "manifest": f"{body}".replace("'", '"')}}


def test_the_pods_of_a_gang_may_not_get_different_programs() -> None:
    assert "its 2 pods may run different programs" in only("images", subject_of(gang(image="fit:1"))).sentence


@pytest.mark.parametrize(
    ("budgets", "checkpoints", "causes"),
    [
        ({}, True, set()),
        ({"user_error": 3}, True, set()),
        ({"user_error": 4}, True, {"user_error"}),
        ({"user_error": None}, True, {"user_error", "gpu_out_of_memory"}),
        ({"out_of_memory": 8}, True, {"out_of_memory"}),
        ({"deadline": 8}, True, set()),
        ({"deadline": 8}, False, {"deadline"}),
        ({"output_missing": 5}, True, {"output_missing"}),
        ({"preemption": None, "infrastructure": None, "storage": 100}, True, set()),
    ],
)
def test_many_retries_of_a_repeating_cause_are_a_warning(
    budgets: Manifest, checkpoints: bool, causes: set[str]
) -> None:
    asked = {"retry": RetryPolicy(**budgets), "checkpoints": CheckpointPolicy() if checkpoints else None}
    lines = found("retries", subject_of(train(asked=asked)))
    assert {one.sentence.split()[0] for one in lines if one.state == "warning"} - {"gpu_out_of_memory"} == causes - {
        "gpu_out_of_memory"
    }
    assert bool(causes) == any(one.state == "warning" for one in lines)


def test_more_memory_is_a_reason_to_repeat() -> None:
    retry = RetryPolicy(out_of_memory=8, memory_ceiling_bytes=1 << 34)
    limits = {"resources": {"limits": {"memory": "1Gi"}}}
    assert only("retries", subject_of(train(container=limits, asked={"retry": retry}))).state == "ok"


@pytest.mark.parametrize(
    ("strategy", "state"),
    [
        ({"limit": "3"}, "ok"),
        ({"limit": 10}, "warning"),
        ({"retryPolicy": "OnFailure"}, "warning"),
        ({"limit": "{{workflow.parameters.n}}"}, "warning"),
        ({"limit": "10", "retryPolicy": "OnTransientError"}, "ok"),
        ({"limit": "10", "retryPolicy": "OnError"}, "ok"),
        ({"limit": "10", "retryPolicy": "Always"}, "warning"),
        ({"limit": "10", "expression": "lastRetry.exitCode == '75'"}, "ok"),
    ],
)
@pytest.mark.parametrize("is_step", [True, False])
def test_a_retry_strategy_repeats_what_can_pass(strategy: Manifest, state: str, is_step: bool) -> None:
    other = step("look", retryStrategy=strategy) if is_step else plain("look", retryStrategy=strategy)
    arguments = {"parameters": [{"name": "n", "value": "9"}]}
    lines = found("retries", subject_of(train(), other, arguments=arguments))
    assert {one.state.value for one in lines} == {state}
    assert [one.place for one in lines if one.state == "warning"] == ["look"] * (state == "warning")


@pytest.mark.parametrize(
    ("median", "p99", "state"), [(5, 20, "ok"), (5, 40, "warning"), (31, 40, "failed"), (30, 30, "ok")]
)
def test_a_measured_save_fits_into_the_grace_period(median: float, p99: float, state: str) -> None:
    observed = replace(HEALTHY, saves={"fit": SaveTimes(7, median, p99)})
    one = only("grace", subject_of(train(asked={"grace_seconds": 30})), observed)
    assert (one.state, one.place) == (state, "fit")
    assert "7 measured saves" in one.sentence


def test_a_save_that_was_never_measured() -> None:
    declared = train(asked={"grace_seconds": 30, "checkpoints": CheckpointPolicy(save_seconds=20)})
    assert "declared save of 20 s" in only("grace", subject_of(declared)).sentence
    one = only("grace", subject_of(train()))
    assert one.state == "unknown"
    assert "not measured yet (no earlier run saved)" in one.sentence
    assert (
        "store is down"
        in only("grace", subject_of(train()), replace(HEALTHY, saves=UnknownValue("store is down"))).sentence
    )
    assert not found("grace", subject_of(step()))


@pytest.mark.parametrize(
    ("subject", "state", "words"),
    [
        (train(container={"image": DIGEST}), "ok", "if its program opens tiphys.checkpoint.session()"),
        (train(container={"image": DIGEST}, asked={"checkpoints": None}), "warning", "checkpoints=None"),
    ],
)
def test_work_that_nothing_protects_is_found(subject: Manifest, state: str, words: str) -> None:
    one = only("checkpoints", subject_of(subject))
    assert (one.state.value, words in one.sentence, bool(one.remedy)) == (state, True, state != "ok"), one
    assert not found("checkpoints", subject_of(step(container={"image": DIGEST})))


def test_gpus_of_a_plain_task_are_found() -> None:
    subject = subject_of(step(), plain("eval", container={"image": DIGEST, **GPU}))
    assert "asks for nvidia.com/gpu: no queue counts its GPUs" in only("checkpoints", subject).sentence
    assert not found("checkpoints", subject_of(step(), plain("eval", container={"image": DIGEST})))


def test_time_in_a_queue_counts_for_the_deadline_of_the_workflow() -> None:
    wants = train(asked={"gpu": GpuRequest(gpus=8)})
    assert only("deadline", subject_of(wants)).state == "ok"
    assert only("deadline", subject_of(wants, activeDeadlineSeconds=3600)).state == "warning"
    entry = only("deadline", subject_of(wants, entry={"activeDeadlineSeconds": 3600}))
    assert "template 'main' is 3600 s" in entry.sentence
    assert not found("deadline", subject_of(train(), activeDeadlineSeconds=3600))


@pytest.mark.parametrize(("items", "state"), [(10, "ok"), (1750, "warning"), (20_000, "warning")])
def test_the_workflow_fits_into_one_object(items: int, state: str) -> None:
    subject = subject_of(train(), tasks=[task("fit", withItems=[f"item-{number}" for number in range(items)])])
    one = only("size", subject)
    assert one.state == state, one
    assert ("will have" in one.sentence) == (state == "warning")


def test_a_schedule_that_argo_refuses() -> None:
    subject = replace(subject_of(step()), schedule_complaint="CronWorkflow 'x' has a name of 60 characters; shorten it")
    assert only("schedule", subject) == Finding(
        "schedule", "failed", "CronWorkflow 'x' has a name of 60 characters", "shorten it"
    )
    assert not found("schedule", subject_of(step()))


QUEUES = ledger.queues(research={"A100": 8})


@pytest.mark.parametrize(
    ("wish", "state", "reason"),
    [
        ({"gpus": 8, "queue": "research"}, "ok", "can be granted"),
        ({"gpus": 9, "queue": "research"}, "failed", "ExceedsMaxQuota"),
        ({"gpus": 1, "queue": "sales"}, "failed", "QueueUnknown"),
        ({"gpus": 1, "queue": "research", "gpu_type": "H100"}, "failed", "NoMatchingGpuType"),
    ],
)
def test_the_queues_can_serve_a_request(wish: Manifest, state: str, reason: str) -> None:
    subject = subject_of(train(asked={"gpu": GpuRequest(**wish)}))
    one = only("gpus", subject, replace(HEALTHY, queues=QUEUES))
    assert (one.state, reason in one.sentence) == (state, True), one
    assert one.place == "fit"


def test_gpus_of_another_resource_need_a_flavor_of_it() -> None:
    flavors = [{"name": "mi300x", "gpu_type": "MI300X", "resource": "amd.com/gpu"}]
    document = {"queues": [{"name": "research", "gpus": {"mi300x": 8}}], "flavors": flavors}
    on_amd = replace(HEALTHY, queues=type(QUEUES).model_validate(document))
    amd, nvidia = (
        subject_of(train(asked={"gpu": GpuRequest(gpus=8, queue="research", resource=resource)}))
        for resource in ("amd.com/gpu", "nvidia.com/gpu")
    )
    assert only("gpus", amd, on_amd).state == "ok"
    assert "gpu_resource='amd.com/gpu'" in only("gpus", nvidia, on_amd).sentence
    assert "resource: amd.com/gpu" in only("gpus", amd, replace(HEALTHY, queues=QUEUES)).sentence
    typed = subject_of(train(asked={"gpu": GpuRequest(gpus=8, resource="amd.com/gpu", gpu_type="MI300X")}))
    assert (only("gpus", typed).state, only("gpus", amd).state) == ("warning", "ok"), "no queues are declared"


def test_owners_priorities_and_stopped_queues() -> None:
    wish = {"gpu": GpuRequest(gpus=1, queue="research", priority=5)}
    subject = subject_of(train(asked=wish))

    def with_queue(**fields: Any) -> PreflightObservation:
        document = {"queues": [{"name": "research", "gpus": {"*": 8}, **fields}]}
        return replace(HEALTHY, queues=type(QUEUES).model_validate(document))

    assert only("gpus", subject, with_queue()).state == "ok"
    assert "QueueNotAllowed" in only("gpus", subject, with_queue(namespaces=["vision"])).sentence
    assert "PriorityTooHigh" in only("gpus", subject, with_queue(max_priority=4)).sentence
    stopped = only("gpus", subject, with_queue(stopped=True))
    assert (stopped.state, "QueueStopped" in stopped.sentence) == ("warning", True)


def test_gpus_of_an_inventory_that_is_too_small() -> None:
    subject = subject_of(train(asked={"gpu": GpuRequest(gpus=8, queue="research")}))
    small = ledger.queues({"A100": {"count": 4}}, research={"A100": 8})
    assert only("gpus", subject, replace(HEALTHY, queues=small)).state == "failed"
    large = ledger.queues({"A100": {"count": 8}}, research={"A100": 8})
    assert only("gpus", subject, replace(HEALTHY, queues=large)).state == "ok"


def test_queues_that_could_not_be_read_stop_nothing() -> None:
    subject = subject_of(train(asked={"gpu": GpuRequest(gpus=8)}))
    assert only("gpus", subject, replace(HEALTHY, queues=FORBIDDEN)).state == "unknown"
    assert only("gpus", subject).state == "ok"
    noted = found("gpus", subject, replace(HEALTHY, queues_note="nodes are not considered"))
    assert [one.state.value for one in noted] == ["unknown", "ok"]


def test_kueue_as_the_ledger() -> None:
    wish = {"gpu": GpuRequest(gpus=8, queue="research")}
    kinds = frozenset({"workloads", "workloads/status", "localqueues", "resourceflavors"})
    installed = DeploymentSearch((plugin("--ledger-kind=kueue"), *CLUSTER.tiphys.found[1:]))

    running = DeploymentSearch(({"status": {"readyReplicas": 1}},))

    def with_queues(*names: str) -> PreflightObservation:
        return with_cluster(tiphys=installed, kueue=KueueObservation(kinds, {"ml": frozenset(names)}, running))

    assert only("gpus", subject_of(train(asked=wish)), with_queues("research")).state == "ok"
    missing = only("gpus", subject_of(train(asked=wish)), with_queues("sales"))
    assert (missing.state, "no LocalQueue research in namespace ml; it has: sales" in missing.sentence) == (
        "failed",
        True,
    )
    memory = {"gpu": GpuRequest(gpus=8, queue="research", min_gpu_memory_mb=1)}
    assert "UnsupportedByKueue" in only("gpus", subject_of(train(asked=memory)), with_queues("research")).sentence
    unread = with_cluster(tiphys=installed, kueue=FORBIDDEN)
    assert only("gpus", subject_of(train(asked=wish)), unread).state == "unknown"


MOUNT = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
VOLUMES = [{"name": "data", "persistentVolumeClaim": {"claimName": "corpus"}}]


def claims(*modes: str) -> PreflightObservation:
    return replace(HEALTHY, objects=ReferencedObjects(claims={"corpus": frozenset(modes) if modes else None}))


@pytest.mark.parametrize(
    ("fan_out", "modes", "state"),
    [
        (False, ("ReadWriteOnce",), "ok"),
        (True, ("ReadWriteOnce",), "warning"),
        (True, ("ReadWriteMany",), "ok"),
        (True, ("ReadOnlyMany", "ReadWriteOnce"), "ok"),
        (True, ("ReadWriteOncePod",), "failed"),
        (False, ("ReadWriteOncePod",), "ok"),
        (False, (), "failed"),
    ],
)
@pytest.mark.parametrize("make", [step, plain])
def test_a_claim_that_items_share(make: Any, fan_out: bool, modes: tuple[str, ...], state: str) -> None:
    user = (
        make("load", container={"image": DIGEST, **MOUNT}, volumes=VOLUMES)
        if make is step
        else {"name": "load", "container": {"image": DIGEST, **MOUNT}, "volumes": VOLUMES}
    )
    items = {"withItems": [1, 2]} if fan_out else {}
    subject = subject_of(user, train(), tasks=[task("load", **items), task("fit")])
    one = only("volumes", subject, claims(*modes))
    assert (one.state, one.place) == (state, "load"), one


def test_a_claim_of_a_function_that_a_fan_out_and_another_task_call() -> None:
    user = step("load", container={"image": DIGEST, **MOUNT}, volumes=VOLUMES)
    calls = [task("once", "load"), task("many", "load", withItems=[1, 2])]
    one = only("volumes", subject_of(user, tasks=calls), claims("ReadWriteOnce"))
    assert (one.state, one.place) == ("warning", "load")
    calls = [task("once", "load"), task("again", "load")]
    assert only("volumes", subject_of(user, tasks=calls), claims("ReadWriteOnce")).state == "ok"


def test_a_template_is_not_mistaken_for_the_task_of_its_name() -> None:
    asking = plain("one") | {"container": {"image": DIGEST, **GPU}}
    subject = subject_of(
        step("two", container={"image": "x:1"}), asking, tasks=[task("one", "two"), task("two", "one")]
    )
    assert [(one.state, one.place) for one in found("checkpoints", subject)] == [("warning", "one")]
    assert only("images", subject).place == "one"


def test_a_claim_of_a_gang() -> None:
    member = gang(**MOUNT) | {"volumes": VOLUMES}
    assert only("volumes", subject_of(member), claims("ReadWriteMany")).state == "ok"
    one = only("volumes", subject_of(member), claims("ReadWriteOnce"))
    assert one.state == "failed"
    assert "its 2 pods run on nodes of their own" in one.sentence
    authored = replicas(DIGEST)
    text = authored["resource"]["manifest"].replace('"image": ', '"volumeMounts": [{"name": "data"}], "image": ')
    mounted = '"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "corpus"}}], "containers"'
    authored["resource"]["manifest"] = text.replace('"containers"', mounted)
    assert only("volumes", subject_of(step(), authored), claims("ReadWriteOnce")).state == "warning"


def test_a_claim_that_the_workflow_makes_needs_no_cluster() -> None:
    made = [{"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}}]
    user = plain("load") | {"container": {"image": DIGEST, **MOUNT}}
    tasks = [task("load", withItems=[1, 2]), task("fit")]
    one = only("volumes", subject_of(user, train(), tasks=tasks, volumeClaimTemplates=made), OFFLINE)
    assert one.state == "warning"
    made[0]["spec"] = {"accessModes": ["ReadWriteMany"]}
    assert only("volumes", subject_of(user, train(), tasks=tasks, volumeClaimTemplates=made), OFFLINE).state == "ok"


def test_a_claim_of_a_nested_fan_out() -> None:
    user = {"name": "load", "container": {"image": DIGEST, **MOUNT}, "volumes": VOLUMES}
    inner = {"name": "inner", "steps": [[{"name": "a", "template": "load"}]]}
    tasks = [task("inner", withItems=[1, 2]), task("fit")]
    assert only("volumes", subject_of(user, inner, train(), tasks=tasks), claims("ReadWriteOnce")).state == "warning"
    tasks = [task("inner"), task("fit")]
    assert only("volumes", subject_of(user, inner, train(), tasks=tasks), claims("ReadWriteOnce")).state == "ok"


def test_a_volume_that_no_container_mounts_is_no_matter() -> None:
    subject = subject_of(step(volumes=VOLUMES))
    assert not found("volumes", subject, claims())


def test_secrets_and_config_maps_that_pods_name() -> None:
    container = {
        "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        "envFrom": [{"configMapRef": {"name": "settings"}}, {"secretRef": {"name": "maybe", "optional": True}}],
    }
    subject = subject_of(step(container=container))
    assert find_named_objects(subject) == ({"hub": "prep"}, {"settings": "prep"})
    there = ReferencedObjects(secrets={"hub": True}, config_maps={"settings": True})
    assert states(found("secrets", subject, replace(HEALTHY, objects=there))) == {"secrets": "ok"}
    gone = ReferencedObjects(secrets={"hub": False}, config_maps={"settings": FORBIDDEN})
    lines = found("secrets", subject, replace(HEALTHY, objects=gone))
    assert [(one.state.value, one.place) for one in lines] == [("failed", "prep"), ("unknown", "prep")]
    assert states(found("secrets", subject, replace(HEALTHY, objects=FORBIDDEN))) == {"secrets": "unknown"}


def test_an_object_decided_by_a_template_tag_is_not_looked_for() -> None:
    manifest = (
        '{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"namespace": "other"}, "spec": {"template": {"spec": '
        '{"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "c-{{inputs.parameters.c}}"}}], '
        '"containers": [{"image": "{{inputs.parameters.i}}", "volumeMounts": [{"name": "data"}], '
        '"envFrom": [{"secretRef": {"name": "{{inputs.parameters.s}}"}}], "args": [{{inputs.parameters.a}}]}]}}}}'
    )
    inputs = {"parameters": [{"name": name, "value": "1"} for name in "cisa"]}
    tagged = {"name": "make", "inputs": inputs, "resource": {"action": "create", "manifest": manifest}}
    subject = subject_of(step(container={"image": DIGEST}), tagged)
    assert len(subject.pods) == 2
    assert find_named_objects(subject) == ({}, {})
    assert not found("volumes", subject)
    assert states(found("images", subject)) == {"images": "unknown"}
    assert find_needed_rights(subject, None, {("batch/v1", "Job"): "jobs"}) == {}


def resource(action: str = "create", kind: str = "Job") -> Manifest:
    manifest = f"apiVersion: batch/v1\nkind: {kind}\nmetadata: {{generateName: x-}}"
    return {"name": "make", "resource": {"action": action, "manifest": manifest}}


def test_rights_that_the_accounts_need() -> None:
    plurals = {("batch/v1", "Job"): "jobs"}
    assert find_needed_rights(subject_of(step()), None, plurals) == {}
    made = find_needed_rights(subject_of(step(), resource()), None, plurals)
    assert made == {
        ("tiphys-executor", Permission("create", "jobs", "batch")): "make",
        ("tiphys-executor", Permission("get", "jobs", "batch")): "make",
    }
    own = subject_of(step(), account="own", executor={"serviceAccountName": "exec"})
    needed = find_needed_rights(own, None, plurals)
    assert {account for account, _ in needed} == {"own", "exec"}
    assert ("exec", Permission("create", "workflowtaskresults")) in needed
    assert ("own", Permission("patch", "workflowtasksets/status")) in needed


def test_accounts_beside_those_of_the_chart() -> None:
    other = plain("look") | {"serviceAccountName": "looker", "executor": {"serviceAccountName": "{{x}}"}}
    assert find_accounts(subject_of(step(), other, account="own")) == ["looker", "own"]
    assert find_accounts(subject_of(step(), gang())) == []


def test_a_right_that_is_lacking() -> None:
    right = ("own", Permission("patch", "workflowtasksets/status"))
    subject = subject_of(step(), account="own")
    assert only("rights", subject, replace(HEALTHY, rights=ObservedRights({right: True}))).state == "ok"
    one = only("rights", subject, replace(HEALTHY, rights=ObservedRights({right: False})))
    assert (one.state, "account own may not patch workflowtasksets/status" in one.sentence) == ("failed", True)
    assert only("rights", subject, replace(HEALTHY, rights=FORBIDDEN)).state == "unknown"
    unknown = only("rights", subject, replace(HEALTHY, rights=ObservedRights(missing_accounts=("own",))))
    assert (unknown.state, "no service account own" in unknown.sentence) == ("failed", True)
    missing = only("rights", subject, replace(HEALTHY, rights=ObservedRights({}, {"JobSet": "make"})))
    assert (missing.state, missing.place) == ("failed", "make")


def test_an_account_that_may_not_submit_fails_the_check() -> None:
    subject = subject_of(step())
    assert only("submit", subject).state == "ok"
    assert only("submit", subject, replace(HEALTHY, may_submit=False)).state == "failed"
    assert only("submit", subject, replace(HEALTHY, may_submit=FORBIDDEN)).state == "unknown"


GPUS = train(asked={"gpu": GpuRequest(gpus=2, members=2), "gang": GangSpec(members=2)})
NO_GANGS = in_namespace(accounts=NAMESPACE.accounts - {"tiphys-gang"})
NO_RIGHTS = in_namespace(
    permissions={key: key[0] != "tiphys-gang" for key in NAMESPACE.permissions}  # type: ignore[union-attr]
)
NOT_READY = with_cluster(
    pods=(PodReadiness("plugin", "tiphys", "p"), PodReadiness("controller", "tiphys", "c", "it is starting"))
)
LEDGER_FAILS = with_cluster(
    pods=(
        PodReadiness("plugin", "tiphys", "p", ledger_failure="no ledger"),
        PodReadiness("controller", "tiphys", "c"),
    )
)
NO_PLUGIN = in_namespace(config_maps=frozenset())
PLUGIN = {"executorPlugins": [{"spec": {"sidecar": {}}}]}


@pytest.mark.parametrize(
    ("templates", "fields", "observed", "state"),
    [
        ((step(),), {}, HEALTHY, "ok"),
        ((step(),), {}, in_namespace(accounts=frozenset()), "failed"),
        ((step(),), {}, in_namespace(exists=False), "failed"),
        ((step(),), {}, NO_PLUGIN, "failed"),
        ((step(),), PLUGIN, NO_PLUGIN, "ok"),
        ((step(),), {}, NOT_READY, "warning"),
        ((step(),), {}, LEDGER_FAILS, "ok"),
        ((train(asked={"gpu": GpuRequest(gpus=1)}),), {}, LEDGER_FAILS, "failed"),
        ((step(),), {}, NO_RIGHTS, "ok"),
        ((GPUS,), {}, NO_RIGHTS, "failed"),
        ((GPUS,), {}, NO_GANGS, "failed"),
        ((step(),), {}, NO_GANGS, "ok"),
        ((step(),), {}, in_namespace(secrets={**NAMESPACE.secrets, "tiphys-store": frozenset()}), "ok"),
        ((train(),), {}, in_namespace(secrets={**NAMESPACE.secrets, "tiphys-store": frozenset()}), "warning"),
        ((step(),), {}, in_namespace(permissions=FORBIDDEN), "unknown"),
        ((step(),), {}, with_cluster(argo_kinds=frozenset()), "failed"),
    ],
)
def test_findings_of_doctor_count_where_the_workflow_rests_on_them(
    templates: tuple[Manifest, ...], fields: Manifest, observed: PreflightObservation, state: str
) -> None:
    lines = found("cluster", subject_of(*templates, **fields), observed)
    assert states(lines) == {"cluster": state}, lines


def test_warnings_for_the_administrator_are_only_counted() -> None:
    line = only("cluster", subject_of(step()))
    assert line.state == "ok"
    assert "warns of" in line.sentence
    assert "DEFAULT_REQUEUE_TIME" not in line.sentence


@pytest.mark.parametrize(
    ("installed", "state"), [("", "ok"), ("0.1.0", "ok"), ("0.1.9", "ok"), ("0.3.0", "warning"), ("1.1.0", "warning")]
)
def test_the_version_of_the_services(installed: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiphys.__version__", "0.1.0")
    assert only("version", subject_of(step()), replace(HEALTHY, plugin_version=installed)).state == state


def test_the_store_of_the_services_is_another() -> None:
    other = DeploymentSearch(
        (
            {
                **plugin(),
                "spec": plugin()["spec"]
                | {
                    "template": {
                        "spec": {
                            "containers": [{"args": ["--store=s3://ml-runs/{namespace}/tiphys", "--namespace=ml"]}]
                        }
                    }
                },
            },
        )
    )
    lines = found("store", subject_of(step()), with_cluster(tiphys=other))
    assert [one.state.value for one in lines] == ["ok", "failed"]
    assert "in s3://ml-runs/ml/tiphys, and this pipeline names s3://ml-runs/tiphys" in lines[-1].sentence


def test_a_store_that_breaks_a_promise() -> None:
    probed = [failed("2 writers won", "")._replace(check="race"), warning("is 70 s off", "")._replace(check="clock")]
    lines = found("store", subject_of(step()), replace(HEALTHY, store=probed))
    assert [one.state.value for one in lines] == ["failed", "warning"]
    assert "race: 2 writers won" in lines[0].sentence
    slow = replace(HEALTHY, store=UnknownValue("store s3://x did not answer within 30 s"))
    assert only("store", subject_of(step()), slow).state == "unknown"


OFFLINE = PreflightObservation(unasked="there is no cluster to ask: no kubeconfig")


def test_without_a_cluster_one_line_says_what_was_not_checked() -> None:
    lines = run(subject_of(GPUS | {"volumes": VOLUMES}, step()), OFFLINE)
    unread = [one for one in lines if "no kubeconfig" in one.sentence]
    assert [one.sentence.split(": ")[1] for one in unread] == ["installation, rights, claims, Secrets, queues"]
    assert not failed_checks(lines)
    with_queues = run(subject_of(GPUS), replace(OFFLINE, queues=QUEUES))
    assert "queues" not in next(one for one in with_queues if "no kubeconfig" in one.sentence).sentence
    assert any(one.check == "gpus" and one.state == "failed" for one in with_queues)


def test_a_namespace_that_is_not_known_is_one_that_may_use_the_queue() -> None:
    owned = type(QUEUES).model_validate({"queues": [{"name": "default", "gpus": {"*": 8}, "namespaces": ["vision"]}]})
    here = subject_of(train(asked={"gpu": GpuRequest(gpus=1)}))
    assert only("gpus", here, replace(OFFLINE, queues=owned)).state == "failed"
    assert only("gpus", replace(here, namespace=""), replace(OFFLINE, queues=owned)).state == "ok"


def test_a_finding_knows_its_line(tmp_path: Path) -> None:
    file = tmp_path / "digits.py"
    file.write_text("x = 1\n\nprep = Step(name='prep')\n\ndef make_it():\n    pass\n")
    subject = subject_of(step("prep"), step("make-it"), file=file)
    assert (subject.line_of("prep"), subject.line_of("make-it"), subject.line_of("other")) == (3, 5, None)


def test_the_lines_of_a_yaml_file(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(
        "apiVersion: argoproj.io/v1alpha1\nkind: Workflow\nmetadata: {name: w}\nspec:\n  entrypoint: main\n"
        "  templates:\n  - name: make_it\n    container: {image: x}\n"
        "  - name: main\n    dag: {tasks: [{name: again, template: make_it}]}\n"
    )
    subject = subject_of(step("make-it"), file=file)
    assert (subject.line_of("make-it"), subject.line_of("again"), subject.line_of("main")) == (7, 7, 9)


@pytest.mark.parametrize("text", ["def (", "\0", "'" * 3])
def test_a_file_without_lines_is_no_failure(text: str, tmp_path: Path) -> None:
    file = tmp_path / "digits.py"
    file.write_text(text)
    assert subject_of(step(), file=file).line_of("prep") is None


@pytest.mark.parametrize("manifest", ["{{", "[" * 1000, "a: *b", "- {{x}}", 7])
def test_an_object_that_cannot_be_read_is_none(manifest: Any) -> None:
    other = {"name": "make", "resource": {"action": "create", "manifest": manifest}}
    subject = subject_of(step(), other)
    assert subject.created_objects == []
    assert not failed_checks(run(subject, HEALTHY))
