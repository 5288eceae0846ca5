"""``sweep=`` and ``parallel=`` compile to Argo's own fan-out, and `best` to a step behind it."""

from pathlib import Path
from typing import Annotated, Any

import pytest
from hera.workflows import Artifact, Parameter
from hera.workflows.models import ValueFrom

from hera_pipelines import CronPipeline, Pipeline, Plain, Step, Train, best, choice, grid, random_search, step, train
from hera_pipelines.compile import workflow_template
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest, find_template

Data = Annotated[Path, Artifact(name="data")]
Loss = Annotated[float, Parameter(name="loss")]
Model = Annotated[Path, Artifact(name="model")]


@step()
def prepare() -> Annotated[str, Artifact(name="data")]:
    return "rows"


@train(image="i:1")
def fit(data: Data, lr: float, width: int = 64) -> tuple[Loss, Model]:
    return lr * width, data


@step()
def register(model: Model, trial: str) -> None:
    _ = (model, trial)


def swept(**fields: Any) -> Pipeline:
    with Pipeline("digits", store="s3://ml-runs/t") as pipeline:
        fit(prepare(), **fields)
    return pipeline


def task(pipeline: Pipeline, name: str = "fit") -> Manifest:
    tasks = CompiledPipeline.from_manifest(pipeline.compile(store="s3://b/t")).tasks()
    return next(task for task in tasks if task["name"] == name)


def test_a_trial_is_an_item_and_the_other_values_are_given_to_all() -> None:
    made = task(swept(sweep=grid(lr=[0.1, 0.01]), width=32))

    assert made["withItems"] == [{"lr": 0.1}, {"lr": 0.01}]
    assert made["arguments"]["parameters"] == [
        {"name": "width", "value": "32"},
        {"name": "lr", "value": "{{item.lr}}"},
        {"name": "tiphys-item", "value": "{{item}}"},
    ]


def test_python_names_stand_for_those_of_argo() -> None:
    trainer = Train(name="fit", image="i", command=["c"], inputs=[Parameter(name="learning-rate")])
    with Pipeline("digits") as pipeline:
        trainer(sweep=grid(learning_rate=[1, 2]))
    assert task(pipeline)["withItems"] == [{"learning-rate": 1}, {"learning-rate": 2}]


def test_the_workflow_says_how_its_trials_came_about_and_so_does_a_template_of_it() -> None:
    search = random_search(2, seed=7, lr=choice(0.1, 0.2))
    compiled = swept(sweep=search).compile(store="s3://b/t")

    assert compiled["metadata"]["annotations"]["sweep.tiphys.dev/fit"] == search.description
    made = workflow_template(compiled, "digits")
    assert made["spec"]["workflowMetadata"]["annotations"]["sweep.tiphys.dev/fit"] == search.description


def test_a_nightly_sweep_says_so_too() -> None:
    with CronPipeline("nightly", schedules=["0 2 * * *"]) as pipeline:
        fit(prepare(), sweep=grid(lr=[1, 2]))
    compiled = pipeline.compile(store="s3://b/t")
    assert "sweep.tiphys.dev/fit" in compiled["spec"]["workflowMetadata"]["annotations"]


def test_parallel_limits_the_dag() -> None:
    assert (
        find_template(swept(sweep=grid(lr=[1, 2, 3]), parallel=2).compile(store="s3://b/t"), "main")["parallelism"] == 2
    )
    assert "parallelism" not in find_template(swept(sweep=grid(lr=[1, 2, 3])).compile(store="s3://b/t"), "main")
    with Pipeline("digits") as pipeline:
        fit(prepare(), lr="{{item}}", with_items=[1, 2, 3], parallel=2)
    assert find_template(pipeline.compile(store="s3://b/t"), "main")["parallelism"] == 2


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"sweep": grid(lrr=[1])}, "step 'fit' has no parameter 'lrr'; did you mean 'lr'\\? It has: lr, width"),
        ({"sweep": grid(data=["x"])}, "'data' is an artifact"),
        ({"sweep": grid(lr=[1]), "lr": 2}, "'lr' is swept, and given a value"),
        ({"sweep": grid(lr=[1]), "arguments": {"lr": 2}}, "'lr' is swept, and given a value"),
        ({"sweep": grid(lr=[1]), "with_items": [1]}, "both sweep and with_items"),
        ({"sweep": grid(lr=[1]), "with_param": "[]"}, "both sweep and with_param"),
        ({"sweep": [{"lr": 1}]}, "is not a sweep; give grid"),
        ({"lr": 1, "parallel": 2}, "runs once, so parallel=2 has no effect"),
        ({"sweep": grid(lr=[1]), "parallel": 0}, "parallel=0 is not a number of trials"),
    ],
)
def test_a_sweep_that_does_not_fit_its_step_is_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        swept(**fields)


def test_a_second_limit_for_one_dag_is_refused() -> None:
    with Pipeline("digits"):
        fit(prepare(), sweep=grid(lr=[1]), parallel=2)
        with pytest.raises(UsageError, match="already has parallelism 2"):
            fit(prepare(name="again"), name="more", sweep=grid(lr=[1]), parallel=3)


def test_the_best_trial_hands_on_all_that_a_trial_makes() -> None:
    with Pipeline("digits", store="s3://ml-runs/t") as pipeline:
        winner = best(fit(prepare(), sweep=grid(lr=[1, 2])), metric="loss", mode="max")
        register(model=winner, trial=winner)

    spec = CompiledPipeline.from_manifest(pipeline.compile(store="s3://b/t")).step("best")
    assert (spec.parameters, spec.artifacts, spec.cache) == (("trial", "loss"), ("model",), False)
    assert task(pipeline, "best")["depends"] == "fit.AnySucceeded"
    container = find_template(pipeline.compile(store="s3://b/t"), "best-run")["container"]
    assert {"TIPHYS_STORE", "TIPHYS_RUN"} <= {one["name"] for one in container["env"]}, "its program needs both"
    assert container["image"] == "i:1"
    assert container["args"] == ["fit", "--metric", "loss", "--mode", "max"]
    assert container["envFrom"] == [{"secretRef": {"name": "tiphys-store", "optional": True}}]
    assert task(pipeline, "register")["arguments"]["parameters"][0]["value"] == (
        "{{tasks.best.outputs.parameters.trial}}"
    )


def test_best_has_a_gate_and_refuses_trials_without_records() -> None:
    loss = Parameter(name="loss", value_from=ValueFrom(path="/tmp/loss"))
    trial = {"image": "i", "inputs": [Parameter(name="lr")], "outputs": loss}
    with Pipeline("digits", store="s3://ml-runs/t"):
        trials = Plain(name="plain", image="i", inputs=[Parameter(name="lr")])(sweep=grid(lr=[1, 2]))
        with pytest.raises(UsageError, match="is plain, so its trials have no record"):
            best(trials, metric="loss")
    with Pipeline("digits", store="s3://ml-runs/t") as pipeline:
        best(Step(name="try", **trial)(sweep=grid(lr=[1, 2])), metric="loss", gate=False)
    assert CompiledPipeline.from_manifest(pipeline.compile()).step("best").is_gated


def test_the_best_of_what_is_no_sweep_is_refused() -> None:
    trainer = Train(
        name="t",
        image="i",
        command=["c"],
        inputs=[Parameter(name="lr")],
        outputs=Parameter(name="trial", value_from=ValueFrom(path="/tmp/trial")),
    )
    with Pipeline("digits"):
        with pytest.raises(UsageError, match="takes the task of a sweep"):
            best(prepare(), metric="loss")
        trials = trainer(sweep=grid(lr=[1]))
        with pytest.raises(UsageError, match="step 't' has an output parameter 'trial'"):
            best(trials, metric="loss")
        for wrong in ({"metric": ""}, {"metric": "loss", "mode": "least"}):
            with pytest.raises(UsageError, match=r"name of a metric|neither 'min' nor 'max'"):
                best(trials, **wrong)  # type: ignore[arg-type]
