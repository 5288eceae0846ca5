"""Calling steps inside a pipeline: arguments find inputs, tasks stand for outputs."""

from pathlib import Path
from typing import Annotated, Any

import pytest
from hera.workflows import DAG, Artifact, Container, Parameter, Steps, Workflow, script
from hera.workflows.models import ValueFrom

from hera_pipelines import Pipeline, Plain, Step, plain, step, train
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest, find_template

Data = Annotated[Path, Artifact(name="data", path="/tmp/data")]


def loss(name: str = "loss") -> Parameter:
    return Parameter(name=name, value_from=ValueFrom(path=f"/tmp/{name}"))


@step(outputs=[Artifact(name="data", path="/tmp/data")])
def preprocess(source: str = "raw") -> str:
    return source


@train(image="python:3.12", outputs=[Artifact(name="model", path="/tmp/model"), loss(), loss("accuracy")])
def fit(data: Data, lr: float = 0.1) -> None:
    _ = (data, lr)


@step()
def report(loss: float) -> None:
    _ = loss


def tasks(pipeline: Pipeline) -> dict[str, Manifest]:
    compiled = pipeline.compile(store="s3://b/t")
    return {t["name"]: t for t in find_template(compiled, compiled["spec"]["entrypoint"])["dag"]["tasks"]}


def given(task: Manifest) -> dict[str, str]:
    return {p["name"]: p["value"] for p in task.get("arguments", {}).get("parameters", [])}


def test_arguments_are_matched_by_position_and_by_name() -> None:
    with Pipeline("digits") as pipeline:
        fit(preprocess("s3://raw"), lr=0.5)

    made = tasks(pipeline)
    assert given(made["preprocess"]) == {"source": "s3://raw"}
    assert given(made["fit"]) == {"lr": "0.5"}


def test_a_task_stands_for_its_output_and_is_waited_for() -> None:
    with Pipeline("digits") as pipeline:
        fit(preprocess())

    made = tasks(pipeline)
    assert made["fit"]["arguments"]["artifacts"] == [
        {"name": "data", "from": "{{tasks.preprocess.outputs.artifacts.data}}"}
    ]
    assert made["fit"]["depends"] == "preprocess"


def test_an_output_is_chosen_among_several_by_the_name_of_the_input() -> None:
    with Pipeline("digits") as pipeline:
        report(loss=fit(preprocess()))

    assert given(tasks(pipeline)["report"]) == {"loss": "{{tasks.fit.outputs.parameters.loss}}"}


def test_an_output_can_be_passed_by_name() -> None:
    with Pipeline("digits") as pipeline:
        report(loss=fit(preprocess()).get_parameter("accuracy"))

    assert given(tasks(pipeline)["report"]) == {"loss": "{{tasks.fit.outputs.parameters.accuracy}}"}


def test_workflow_parameters_can_be_passed() -> None:
    with Pipeline("digits", arguments=Parameter(name="rate", value="1")) as pipeline:
        fit(preprocess(), lr=pipeline.get_parameter("rate"))

    assert given(tasks(pipeline)["fit"]) == {"lr": "{{workflow.parameters.rate}}"}


def test_heras_own_way_of_calling_still_works() -> None:
    with Pipeline(generate_name="digits-", entrypoint="flow") as pipeline, DAG(name="flow"):
        first = preprocess(arguments={"source": "a"})
        second = fit(name="second", arguments=[first.get_artifact("data"), {"lr": 0.2}], when="1 == 1")
        first >> second

    made = tasks(pipeline)
    assert given(made["second"]) == {"lr": "0.2"}
    assert (made["second"]["when"], made["second"]["depends"]) == ("1 == 1", "preprocess")


Model = Annotated[Path, Artifact(name="model", path="/tmp/model")]
Loss = Annotated[float, Parameter(name="loss")]


@train(image="python:3.12")
def tune(lr: float) -> tuple[Model, Annotated[str, Artifact(name="log")], Loss]:
    return __import__("pathlib").Path("model"), str(lr), lr


@step()
def compare(first: Model, second: Model, before: Loss, after: Loss) -> None:
    _ = (first, second, before, after)


def test_inputs_that_share_an_annotation_are_named_after_their_parameters() -> None:
    with Pipeline("digits") as pipeline:
        one, two = tune(0.1, name="one"), tune(0.2, name="two")
        compare(one, two, one, two)

    made = tasks(pipeline)["compare"]
    assert made["arguments"]["artifacts"] == [
        {"name": "first", "from": "{{tasks.one.outputs.artifacts.model}}"},
        {"name": "second", "from": "{{tasks.two.outputs.artifacts.model}}"},
    ]
    assert given(made) == {
        "before": "{{tasks.one.outputs.parameters.loss}}",
        "after": "{{tasks.two.outputs.parameters.loss}}",
    }
    inputs = compare.script._build_template().inputs
    assert inputs
    assert len({artifact.path for artifact in inputs.artifacts or []}) == 2


def test_items_fill_the_parameters_of_their_names() -> None:
    with Pipeline("digits") as pipeline:
        fit(preprocess(), with_items=[{"lr": 0.1}, {"lr": 0.2}])

    made = tasks(pipeline)["fit"]
    assert made["withItems"] == [{"lr": 0.1}, {"lr": 0.2}]
    assert given(made) == {"lr": "{{item.lr}}", "tiphys-item": "{{item}}"}


def test_items_fill_the_inputs_of_a_container_and_leave_what_is_given() -> None:
    score = Step(name="score", image="i", inputs=[Parameter(name="lr"), Parameter(name="seed")])
    with Pipeline("digits") as pipeline:
        score(seed=7, with_items=[{"lr": 0.1, "seed": 1}])

    assert given(tasks(pipeline)["score"]) == {"seed": "7", "lr": "{{item.lr}}", "tiphys-item": "{{item}}"}


def test_items_made_at_run_time_fill_what_was_not_given() -> None:
    with Pipeline("digits") as pipeline:
        report(with_param="[1, 2]")

    assert given(tasks(pipeline)["report"])["loss"] == "{{item}}"


def test_the_parameters_of_a_fan_out_arrive_as_a_list() -> None:
    with Pipeline("digits") as pipeline:
        sweep = fit(preprocess(), name="sweep", with_items=[{"lr": 0.1}, {"lr": 0.2}])
        report(loss=sweep)

    assert given(tasks(pipeline)["report"])["loss"] == "{{tasks.sweep.outputs.parameters.loss}}"


def test_a_container_takes_its_declared_inputs() -> None:
    score = Step(
        name="score",
        image="i",
        inputs=[Parameter(name="learning-rate"), Artifact(name="data", path="/d")],
        outputs=loss(),
    )
    with Pipeline("digits") as pipeline:
        score(learning_rate=3, data=preprocess())

    made = tasks(pipeline)["score"]
    assert given(made) == {"learning-rate": "3"}
    assert made["arguments"]["artifacts"][0]["from"] == "{{tasks.preprocess.outputs.artifacts.data}}"


def test_outside_a_pipeline_a_step_is_its_function() -> None:
    assert preprocess("here") == "here"
    assert preprocess.__name__ == "preprocess"  # type: ignore[attr-defined]


def test_names_are_made_fit_to_be_stored() -> None:
    @step()
    def Make_Data() -> None: ...

    with Pipeline("digits") as pipeline:
        Make_Data()

    assert set(tasks(pipeline)) == {"make-data"}


# (what is called, words of the refusal)
MISTAKES: dict[str, tuple[Any, str]] = {
    "unknown input": (lambda: fit(preprocess(), rate=1), "has no input 'rate'; it has: data, lr"),
    "a misspelled input": (
        lambda: fit(preprocess(), dat=1),
        "'dat'; did you mean 'data'? It has: data, lr",
    ),
    "no such output parameter": (
        lambda: fit(preprocess()).get_parameter("los"),
        "task 'fit' has no output parameter 'los'; did you mean 'loss'? It has: loss, accuracy",
    ),
    "no such output artifact": (
        lambda: preprocess().get_artifact("model"),
        "task 'preprocess' has no output artifact 'model'; it has: data",
    ),
    "given twice": (lambda: fit(preprocess(), data=preprocess(name="again")), "input 'data' is given twice"),
    "too many": (lambda: report(1, 2), "takes 1 inputs, and 2 were given"),
    "a value for an artifact": (lambda: fit("s3://data"), "input 'data' is an artifact"),
    "an artifact for a value": (
        lambda: report(preprocess().get_artifact("data")),
        "input 'loss' is a parameter",
    ),
    "no such output": (lambda: report(preprocess()), "output parameters of 'preprocess', which are: none"),
    "several outputs": (
        lambda: preprocess(fit(preprocess(name="first"))),
        "output parameters of 'fit', which are: loss, accuracy",
    ),
    "artifacts of many": (
        lambda: fit(preprocess(name="many", with_items=[{"source": "a"}])),
        "'many' is fanned out",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_call_that_makes_no_sense_is_refused(name: str) -> None:
    call, words = MISTAKES[name]
    with pytest.raises(UsageError) as caught, Pipeline("digits"):
        call()

    assert words in str(caught.value)


def test_steps_that_normalise_to_one_name_are_refused() -> None:
    @step(name="fit-it")
    def one() -> None:
        _ = 1

    @step()
    def Fit_It() -> None:
        _ = 2

    with pytest.raises(UsageError, match="two different steps are called 'fit-it'"), Pipeline("digits"):
        one(name="first")
        Fit_It(name="second")


def test_a_step_may_be_used_twice() -> None:
    with Pipeline("digits") as pipeline:
        preprocess(name="first")
        preprocess(name="second")

    assert set(tasks(pipeline)) == {"first", "second"}


def test_a_dag_and_tasks_outside_it_are_refused() -> None:
    refused = pytest.raises(UsageError, match="call all tasks inside the DAG, or none")
    with refused, Pipeline("digits", entrypoint="flow"):
        with DAG(name="flow"):
            preprocess()
        report(1)


def test_a_template_called_main_is_not_taken_for_the_entry() -> None:
    with pytest.raises(UsageError, match="has a DAG of its own"), Pipeline("digits"):
        Container(name="main", image="i")
        preprocess()


def test_annotations_that_are_strings_are_refused() -> None:
    def late(x: "int") -> None: ...

    with pytest.raises(UsageError, match="remove `from __future__ import annotations`"):
        step()(late)


def test_in_plain_hera_a_step_is_a_script() -> None:
    with Workflow(generate_name="plain-", entrypoint="main") as workflow, Steps(name="main"):
        preprocess(arguments={"source": "a"})

    assert {t.name for t in workflow.templates} == {"main", "preprocess"}


def test_plain_scripts_and_steps_live_together() -> None:
    @script(image="i")
    def hello() -> None:
        _ = "hello"

    with Pipeline("digits", entrypoint="main") as pipeline, DAG(name="main"):
        hello() >> preprocess()

    made = tasks(pipeline)
    assert made["hello"] == {"name": "hello", "template": "hello"}
    assert made["preprocess"]["depends"] == "hello"


def test_plain_steps_are_called_like_gated_ones_and_left_to_argo() -> None:
    @plain(image="python:3.12", retry_strategy={"limit": 2})
    def notify(loss: float) -> Annotated[str, Parameter(name="sent")]:
        return str(loss)

    clean = Plain(name="clean", image="alpine", command=["true"], inputs=[Parameter(name="sent")])
    with Pipeline("digits") as pipeline:
        clean(sent=notify(fit(preprocess()).get_parameter("loss")))
    compiled = pipeline.compile(store="s3://b/t")

    assert tasks(pipeline)["clean"]["depends"] == "notify"
    for name in ("notify", "clean"):
        template = find_template(compiled, name)
        assert "annotations" not in template.get("metadata", {})
        assert not {"dag", "steps", "plugin"} & template.keys()
    assert find_template(compiled, "notify")["retryStrategy"] == {"limit": 2}
    assert list(CompiledPipeline.from_manifest(compiled).steps) == ["preprocess", "fit"]


def test_a_plain_step_takes_no_setting_of_a_gated_one() -> None:
    with pytest.raises(UsageError, match="cache"):
        plain(cache=False)
    with pytest.raises(UsageError, match="cache"):
        Plain(name="clean", image="alpine", command=["true"], cache=False)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"Plain\(…\) needs name"):
        Plain(image="alpine", command=["true"])
