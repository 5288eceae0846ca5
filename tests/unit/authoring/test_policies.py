"""What stands beside a step becomes settings, or a sentence that says what is wrong."""

import inspect
from math import inf, nan
from typing import Any

import pytest
from hera.shared import global_config

from hera_pipelines import (
    AKS_SPOT,
    GKE_SPOT,
    Checkpoints,
    Pipeline,
    Retries,
    SharedVolume,
    Step,
    Train,
    plain,
    step,
    train,
)
from hera_pipelines.authoring.step_options import TrainOptions
from hera_pipelines.compile import StepSettings
from hera_pipelines.compile.authored_step import AuthoredStep
from tiphys.errors import UsageError
from tiphys.protocol.gang import GangBackend, GangSpec
from tiphys.protocol.step_spec import (
    STEP_ANNOTATION,
    BestCheckpoints,
    CheckpointPolicy,
    GpuRequest,
    NodeLabelValue,
    RetentionPolicy,
    RetryPolicy,
    StepKind,
    StepSpec,
)


def settings(template: Any) -> StepSettings:
    script = getattr(template, "script", template)
    return StepSettings.from_annotation(script.name, script.annotations[STEP_ANNOTATION])


def compiled_spec(template: Any) -> StepSpec:
    program = {"name": "fit", "container": {"image": "i", "command": ["x"]}}
    return AuthoredStep("fit", {}, program, settings(template)).spec()


def nothing() -> None: ...


EVERYTHING: dict[str, Any] = {
    "image": "ghcr.io/acme/digits:1.4",
    "gpus": 2,
    "gpu_type": "A100",
    "min_gpu_memory_mb": 40_000,
    "queue": "research",
    "priority": 5,
    "checkpoints": Checkpoints(every="5m", keep_last=None, save_time="20s", volume=SharedVolume(claim="c")),
    "cache": False,
    "share": True,
    "retries": Retries(user_error=1, backoff="1m"),
    "grace": "2m",
    "deadline": "1h30m",
    "spot": GKE_SPOT,
}


@pytest.mark.parametrize(
    "template", [train(**EVERYTHING)(nothing), Train(name="nothing", **EVERYTHING)], ids=["function", "container"]
)
def test_every_setting_of_the_author_arrives(template: Any) -> None:
    assert settings(template) == StepSettings(
        kind=StepKind.TRAIN,
        cache=False,
        share=True,
        retry=RetryPolicy(user_error=1, backoff_seconds=60),
        gpu=GpuRequest(gpus=2, gpu_type="A100", min_gpu_memory_mb=40_000, queue="research", priority=5),
        checkpoints=CheckpointPolicy(every=300, keep_last=None, save_seconds=20),
        volume=SharedVolume(claim="c"),
        grace_seconds=120,
        deadline_seconds=5400,
        spot=(GKE_SPOT,),
    )


@pytest.mark.parametrize(
    ("options", "checkpoints"),
    [({}, Checkpoints().policy()), ({"checkpoints": None}, None)],
    ids=["not named", "none"],
)
def test_training_keeps_checkpoints_unless_its_author_says_none(
    options: dict[str, Any], checkpoints: CheckpointPolicy | None
) -> None:
    for template in (train(image="x", **options)(nothing), Train(name="nothing", image="x", **options)):
        assert settings(template).checkpoints == checkpoints
    assert checkpoints is None or (checkpoints.every, checkpoints.keep_last) == (600, 3)


@pytest.mark.parametrize("template", [step()(nothing), Step(name="nothing")], ids=["function", "container"])
def test_a_template_without_settings_gets_the_defaults(template: Any) -> None:
    assert settings(template) == StepSettings(kind=StepKind.STEP)


@pytest.mark.parametrize("template", [step(gate=True)(nothing), Step(name="nothing", gate=True)], ids=["@step", "Step"])
def test_a_gate_is_asked_for_and_costs_the_annotation_of_others_nothing(template: Any) -> None:
    assert settings(template) == StepSettings(kind=StepKind.STEP, gate=True)
    assert compiled_spec(template).is_gated
    assert '"gate":true' in compiled_spec(template).model_dump_json()
    without = Step(name="nothing")
    assert not compiled_spec(without).is_gated
    assert "gate" not in settings(without).model_dump_json() + compiled_spec(without).model_dump_json()


def test_the_default_budgets_are_those_of_the_contract() -> None:
    assert Retries().policy() == RetryPolicy()
    assert Checkpoints().policy() == CheckpointPolicy()


def test_escalation_settings_are_written_beside_the_budgets() -> None:
    policy = Retries(memory_ceiling="64Gi", memory_factor=2, on_demand_after=3, avoid_node_after=None).policy()

    assert policy == RetryPolicy(
        memory_ceiling_bytes=64 << 30, memory_factor=2, on_demand_after=3, avoid_node_after=None
    )
    assert RetryPolicy.model_validate_json(policy.model_dump_json()) == policy


def test_causes_that_came_later_add_nothing_to_a_workflow_that_does_not_mention_them() -> None:
    assert not {"hang", "storage", "memory_factor", "avoid_node_after"} & set(Retries().policy().model_dump())


def test_spot_nodes_reach_the_plugin_only_where_they_are_left_after_a_time() -> None:
    left = Train(name="fit", image="i", command=["x"], spot=GKE_SPOT, retries=Retries(on_demand_after=3))
    assert compiled_spec(left).spot == (NodeLabelValue(label=GKE_SPOT.label, value="true"),)
    assert compiled_spec(Train(name="fit", image="i", command=["x"], spot=GKE_SPOT)).spot == ()


@pytest.mark.parametrize(
    ("every", "expected"),
    [("10m", (600, "seconds")), (90, (90, "seconds")), ("100 steps", (100, "steps")), ("1 step", (1, "steps"))],
)
def test_checkpoints_are_due_by_time_or_by_steps(every: Any, expected: tuple[float, str]) -> None:
    policy = Checkpoints(every=every).policy()

    assert (policy.every, policy.every_unit) == expected


@pytest.mark.parametrize(
    ("every", "bounds", "begin"),
    [("auto", (60, 3600), 600), ("auto:1m..5m", (60, 300), 300), ("auto:1h30m..2h", (5400, 7200), 5400)],
)
def test_an_interval_may_be_left_to_what_is_measured(every: str, bounds: tuple[float, float], begin: float) -> None:
    policy = Checkpoints(every=every).policy()

    assert (policy.every_bounds, policy.every, policy.every_unit) == (bounds, begin, "seconds")


def test_a_retention_policy_is_written_in_words() -> None:
    policy = Checkpoints(keep_last=5, keep_every="1000 steps", keep_best="loss:min:2", delete_after="1h").policy()

    best = BestCheckpoints(metric="loss", order="min", count=2)
    assert policy.retention == RetentionPolicy(last=5, every_steps=1000, best=best, delay_seconds=3600)
    assert Checkpoints(keep_every=500).policy().keep_every == 500
    assert Checkpoints(keep_last=None).policy().retention is None


def test_a_policy_of_retention_travels_in_the_annotation_and_the_default_adds_nothing() -> None:
    policy = Checkpoints(keep_every=500, keep_best="loss:min", delete_after=0).policy()

    assert CheckpointPolicy.model_validate_json(policy.model_dump_json()) == policy
    assert not {"keep_every", "keep_best", "delete_after_seconds"} & set(CheckpointPolicy().model_dump())


def test_a_limit_for_steps_travels_only_where_it_is_set() -> None:
    assert Checkpoints(hang_after="30m").policy().hang_after_seconds == 1800
    assert "hang_after_seconds" not in Checkpoints().policy().model_dump()


def test_spot_in_general_tolerates_the_taints_of_the_known_clouds() -> None:
    assert settings(step(spot=True)(nothing)).spot == (GKE_SPOT, AKS_SPOT)
    assert settings(step(spot=False)(nothing)).spot == ()


def test_the_authors_annotations_are_kept() -> None:
    kept = step(annotations={"owner": "vision"})(nothing).script.annotations

    assert kept is not None
    assert kept["owner"] == "vision"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: step(grace="2 minutes")(nothing), "step 'nothing': grace: '2 minutes' is not a duration"),
        (lambda: step(deadline="")(nothing), "step 'nothing': deadline: '' is not a duration"),
        (lambda: step(deadline=0)(nothing), "deadline_seconds cannot be 0"),
        (lambda: Checkpoints(every="sometimes").policy(), "which also takes '100 steps' and 'auto': 'sometimes'"),
        (lambda: Checkpoints(every="auto:1m").policy(), "'auto:1m' is not a duration"),
        (lambda: Checkpoints(every="auto:5m..1m").policy(), "'auto:5m..1m' leaves nothing between its bounds"),
        (lambda: Checkpoints(every="auto:soon..1m").policy(), "'soon' is not a duration"),
        (lambda: Checkpoints(every="0 steps").policy(), "Checkpoints: every cannot be 0"),
        (lambda: Checkpoints(keep_last=0).policy(), "Checkpoints: keep_last cannot be 0"),
        (lambda: Checkpoints(keep_every="1h").policy(), "keep_every=…): '1h' is not valid: write a number of global"),
        (lambda: Checkpoints(keep_every=0).policy(), "Checkpoints: keep_every cannot be 0"),
        (lambda: Checkpoints(keep_best="loss").policy(), "keep_best=…): 'loss' is not valid: write a metric"),
        (lambda: Checkpoints(keep_last=None, keep_best="loss:min").policy(), "give a number to keep_last"),
        (lambda: Checkpoints(delete_after="soon").policy(), "Checkpoints(delete_after=…): 'soon' is not a duration"),
        (lambda: Checkpoints(delete_after=-1).policy(), "Checkpoints: delete_after_seconds cannot be -1"),
        (lambda: Checkpoints(when_busy="hurry").policy(), "Checkpoints: when_busy cannot be 'hurry'"),
        (lambda: Checkpoints(metrics="9464").policy(), "Checkpoints(metrics=…): '9464' is not valid: write port:9464"),
        (lambda: Retries(preemption=-1).policy(), "Retries: preemption cannot be -1"),
        (lambda: train(image="i", gpus=-1)(nothing), "gpus cannot be -1"),
        (
            lambda: train(image="i", gpus=1, gpu_type="nvidia.com/gpu")(nothing),
            "gpu_type cannot be 'nvidia.com/gpu'",
        ),
        (lambda: train(image="i", gpus=1, gpu_type=[])(nothing), "has an empty list of GPU types"),
        (lambda: train(image="i", gpus=1, gpu_type=["A100", "a b"])(nothing), "gpu_types"),
        (lambda: train(image="i", gpus=1, gpu_type="H100", speed={"H100": 2})(nothing), "several types, so name them"),
        (lambda: train(image="i", gpus=1, speed={"H100": 2})(nothing), "several types, so name them"),
        (
            lambda: train(image="i", gpus=1, gpu_type=["H100", "A100"], speed={"T4": 2})(nothing),
            "speed names T4, which is none of its types; these are: H100, A100",
        ),
        (lambda: train(image="i", gpus=1, gpu_type=["H100", "A100"], speed={"H100": 0})(nothing), "speed.H100"),
        (lambda: train(image="i", gpus=1, gpu_type=["H100", "A100"], speed={"H100": -1})(nothing), "speed.H100"),
        (lambda: train(image="i", gpus=1, gpu_type=["H100", "A100"], speed={"H100": nan})(nothing), "speed.H100"),
        (lambda: train(image="i", gpus=1, gpu_type=["H100", "A100"], speed={"H100": inf})(nothing), "speed.H100"),
        (lambda: train(image="i", speed={"A100": 1})(nothing), "within or tensor_parallel, but gpus=0"),
        (lambda: train(image="i", gpu_type="A100")(nothing), "within or tensor_parallel, but gpus=0"),
        (lambda: Train(image="i"), "Train(…) needs name=…"),
        (lambda: train(image="i", gate=True)(nothing), "'nothing' is a training, which always has a gate; drop gate"),
        (lambda: Train(name="fit", image="i", gate=True), "'fit' is a training, which always has a gate; drop gate"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(make: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()

    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "gpu_type", "gpu_types"),
    [
        (None, None, ()),
        ("any", None, ()),
        ("A100", "A100", ()),
        (["A100", "A100"], "A100", ()),
        (["H100", "A100", "H100"], None, ("H100", "A100")),
    ],
)
def test_gpu_types_are_one_several_or_any(given: Any, gpu_type: str | None, gpu_types: tuple[str, ...]) -> None:
    settings = TrainOptions(gpus=1, gpu_type=given).step_settings("fit")
    assert settings.gpu is not None
    assert (settings.gpu.gpu_type, settings.gpu.gpu_types) == (gpu_type, gpu_types)


def test_gpus_are_those_of_each_node_and_an_attempt_asks_for_all() -> None:
    settings = TrainOptions(gpus=8, nodes=4).step_settings("fit")
    assert settings.gpu is not None
    assert (settings.gpu.gpus, settings.gpu.members, settings.gang) == (32, 4, GangSpec(members=4))
    near = TrainOptions(gpus=8, nodes=4, within="rack", tensor_parallel=2).step_settings("fit").gpu
    assert near is not None
    assert (near.within, near.tensor_parallel) == ("rack", 2)
    without = TrainOptions(nodes=2, backend="jobset").step_settings("fit")
    assert (without.gpu, without.gang) == (None, GangSpec(members=2, backend=GangBackend.JOBSET))
    assert TrainOptions(gpus=8).step_settings("fit").gang is None
    elastic = TrainOptions(gpus=8, nodes="2:4").step_settings("fit")
    assert elastic.gpu is not None
    assert (elastic.gpu.gpus, elastic.gpu.members, elastic.gpu.min_members) == (32, 4, 2)
    assert elastic.gang == GangSpec(members=4, min_members=2)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"nodes": 0}, "members cannot be 0"),
        ({"nodes": "two"}, "the fewest and the most as in '2:4'"),
        ({"nodes": "4:2"}, "are no range"),
        ({"nodes": "2:4", "backend": "jobset"}, "jobset cannot continue with fewer members"),
        ({"nodes": 2, "backend": "mpi"}, "backend cannot be 'mpi'"),
        ({"backend": "jobset"}, "add nodes=2"),
        ({"within": "rack"}, "but one node; add nodes=2"),
        ({"tensor_parallel": 2}, "but one node; add nodes=2"),
        ({"nodes": 3, "tensor_parallel": 2}, "3 pods cannot form groups of 2"),
        ({"nodes": 2, "within": "row"}, "within cannot be 'row'"),
        ({"nodes": 2, "within": "rack", "gpus": 0}, "but gpus=0; add gpus=1"),
    ],
)
def test_a_number_of_nodes_that_makes_no_sense_is_refused(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        TrainOptions(**{"gpus": 1, **asked}).step_settings("fit")


# what is called, words of the refusal
UNKNOWN_KEYWORDS: list[tuple[Any, str]] = [
    (
        lambda: Checkpoints(evry="1m"),  # type: ignore[call-arg]
        "Checkpoints(…) has no keyword 'evry'; did you mean 'every'?",
    ),
    (lambda: Retries(oom=1), "Retries(…) has no keyword 'oom'; it has: preemption, infrastructure"),  # type: ignore[call-arg]
    (lambda: SharedVolume(claims="c"), "SharedVolume(…) has no keyword 'claims'; did you mean 'claim'? It has: claim"),  # type: ignore[call-arg]
    (lambda: train(checkpoint=Checkpoints()), "@train has no keyword 'checkpoint'; did you mean 'checkpoints'?"),
    (lambda: train(gpu=1), "@train has no keyword 'gpu'; did you mean 'gpus'?"),
    (lambda: step(imag="i"), "@step has no keyword 'imag'; did you mean 'image'?"),
    (lambda: Train(name="fit", gpu=1), "Train(…) has no keyword 'gpu'; did you mean 'gpus'?"),  # type: ignore[call-arg]
    (lambda: Pipeline("digits", stor="s3://b"), "Pipeline(…) has no keyword 'stor'; did you mean 'store'?"),  # type: ignore[call-arg]
]


@pytest.mark.parametrize(("call", "words"), UNKNOWN_KEYWORDS)
def test_an_unknown_keyword_is_refused_with_the_known_ones(call: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()

    assert words in str(caught.value)


@pytest.mark.parametrize(("decorator", "name"), [(step, "@step"), (train, "@train"), (plain, "@plain")])
def test_a_decorator_without_parentheses_is_refused_with_what_to_write(decorator: Any, name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} needs parentheses, .*: write {name}\(\) or {name}\(image=…\)"):

        @decorator
        def fit() -> None: ...


@pytest.mark.parametrize(
    "make",
    [
        lambda **image: train(**image)(nothing),
        lambda **image: Train(name="nothing", command=["x"], **image),
        lambda image=None: step(image=image)(nothing),
    ],
    ids=["train", "Train", "step"],
)
def test_a_step_without_an_image_is_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"'nothing' has no image, and Hera would run it in python:3\.\d+"):
        make(image=None)

    make(image="ghcr.io/acme/digits:1.4")
    monkeypatch.setattr(global_config, "image", "ghcr.io/acme/python:3.12")
    make()


def test_the_signature_still_says_what_an_author_may_write() -> None:
    assert list(inspect.signature(Checkpoints).parameters)[:2] == ["every", "keep_last"]
    assert "gpus" in inspect.signature(Train).parameters


PLAIN_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"checkpoints": "1m"}, "checkpoints cannot be '1m'; write checkpoints=Checkpoints(every='10m'), or None to keep"),
    ({"checkpoints": False}, "checkpoints cannot be False; write checkpoints=Checkpoints("),
    ({"retries": 3}, "retries cannot be 3; write retries=Retries(user_error=3)"),
    ({"tracking": "wandb"}, "tracking cannot be 'wandb'; write tracking=Mlflow(…) or Wandb(…)"),
    ({"env": ["A=1"]}, "Hera would ignore 'A=1' in env; write env={'NAME': 'value'}"),
    ({"outputs": ["model"]}, "Hera would ignore 'model' in outputs; write outputs=[Artifact("),
    ({"command": "python -u train.py"}, "command is one text; write the list command=['python', '-u', 'train.py']"),
]


@pytest.mark.parametrize(("given", "said"), PLAIN_VALUES)
def test_a_plain_value_in_the_place_of_an_object_is_refused_with_the_object(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as of_class:
        Train(**{"name": "fit", "image": "i", "command": ["fit"], **given})
    with pytest.raises(UsageError) as of_decorator:
        train(image="i", **given)(nothing)
    assert said in str(of_class.value)
    assert said in str(of_decorator.value)


def test_a_plain_value_of_a_pipeline_is_refused_with_the_object() -> None:
    with pytest.raises(UsageError, match=r"auto_resume cannot be True; write auto_resume=AutoResume\("):
        Pipeline("digits", auto_resume=True)  # type: ignore[arg-type]
