"""What `tracking` and `RegisterModel` compile to, and what they refuse.

| author writes | compiled |
|---|---|
| nothing | no variable, no wrapper |
| ``Mlflow(…)`` | the wrapper in front of the command, URL and experiment as variables, credentials of the store |
| ``Wandb(…)`` | variables alone; the id is an output of admit |
| a variable of the same name | stays |
"""

from typing import Any

import pytest
from hera.workflows import Artifact, Env, Parameter
from support.builders.authored_workflows import by_name

from hera_pipelines import Mlflow, Pipeline, RegisterModel, Step, Train, Wandb, train
from hera_pipelines.pipelines import Program, train_pipeline
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest

URI = "https://mlflow.example.com"


def compiled(*, store: str = "s3://ml-runs/tiphys", **options: Any) -> Manifest:
    fit = Train(**{"name": "fit", "image": "trainer", "command": ["python", "train.py"], **options})
    with Pipeline("digits", store=store) as pipeline:
        fit()
    return pipeline.compile()


def container(manifest: Manifest, template: str = "fit-run") -> Manifest:
    found = by_name(manifest)[template]
    return found.get("container") or found["script"]


def variables(part: Manifest) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in part["env"]}


TRACKED = ["python", "-P", "-m", "tiphys.launch", "--mlflow", "--"]


def test_without_tracking_nothing_of_it_is_compiled() -> None:
    text = str(compiled())
    assert "mlflow" not in text.lower()
    assert "wandb" not in text.lower()
    assert "tracking" not in text


def test_mlflow_puts_a_wrapper_in_front_of_the_program() -> None:
    part = container(compiled(tracking=Mlflow(URI, experiment="digits")))
    assert part["command"] == [*TRACKED, "python", "train.py"]
    assert variables(part)["MLFLOW_TRACKING_URI"] == URI
    assert variables(part)["MLFLOW_EXPERIMENT_NAME"] == "digits"
    assert "WANDB_RUN_ID" not in variables(part)


def test_a_function_is_wrapped_too() -> None:
    @train(image="trainer", tracking=Mlflow())
    def fit() -> None:
        pass

    with Pipeline("digits", store="s3://ml-runs/tiphys") as pipeline:
        fit()
    part = container(pipeline.compile())
    assert part["command"] == [*TRACKED, "python"]
    assert "MLFLOW_TRACKING_URI" not in variables(part), "it comes from the author's Secret"


def test_tracking_does_not_change_what_a_result_is_reused_for() -> None:
    keys = {
        CompiledPipeline.from_manifest(compiled(tracking=tracking)).steps["fit"].template
        for tracking in (None, Mlflow(URI), Wandb())
    }
    assert len(keys) == 1


def test_a_plain_step_with_mlflow_gets_the_credentials_of_the_store() -> None:
    evaluate = Step(name="evaluate", image="tools", command=["evaluate"], tracking=Mlflow(URI))
    with Pipeline("digits", store="s3://ml-runs/tiphys") as pipeline:
        evaluate()
    secrets = container(pipeline.compile(), "evaluate-run")["envFrom"]
    assert secrets == [{"secretRef": {"name": "tiphys-store", "optional": True}}]


def test_wandb_needs_the_environment_alone() -> None:
    manifest = compiled(tracking=Wandb("digits", entity="vision"))
    part = container(manifest)
    own = {name: value for name, value in variables(part).items() if name.startswith("WANDB_")}
    assert own == {
        "WANDB_RUN_ID": "{{inputs.parameters.tiphys-tracking-id}}",
        "WANDB_RESUME": "allow",
        "WANDB_RUN_GROUP": "{{inputs.parameters.tiphys-run-id}}",
        "WANDB_NAME": "{{inputs.parameters.tiphys-run-id}}/fit",
        "WANDB_PROJECT": "digits",
        "WANDB_ENTITY": "vision",
    }
    assert part["command"] == ["python", "-P", "-m", "tiphys.launch", "--", "python", "train.py"]
    outputs = [one["name"] for one in by_name(manifest)["fit-admit"]["outputs"]["parameters"]]
    assert "tracking-id" in outputs


@pytest.mark.parametrize(
    ("tracking", "name"),
    [(Wandb("digits"), "WANDB_PROJECT"), (Wandb(), "WANDB_RUN_ID"), (Mlflow(URI), "MLFLOW_TRACKING_URI")],
)
def test_a_variable_of_the_author_stays(tracking: Mlflow | Wandb, name: str) -> None:
    part = container(compiled(tracking=tracking, env=[Env(name=name, value="mine")]))
    assert [one["value"] for one in part["env"] if one["name"] == name] == ["mine"]


@pytest.mark.parametrize("tracking", [None, Mlflow(URI), Wandb()])
def test_entry_point_that_is_unknown_is_refused(tracking: Mlflow | Wandb | None) -> None:
    with pytest.raises(UsageError, match=r"the entry point of its image is unknown.*add command="):
        compiled(command=None, args=["--fast"], tracking=tracking)


def test_runtime_that_lacks_mlflow_is_refused() -> None:
    with pytest.raises(UsageError, match="which lacks what MLflow needs; install tiphys in the image"):
        compiled(runtime_image="trainer:2", tracking=Mlflow(URI))


def test_without_a_store_there_is_nowhere_to_keep_the_ids() -> None:
    with pytest.raises(UsageError, match="the ids of MLflow, but the run has no store"):
        compiled(store="", tracking=Mlflow(URI), checkpoints=None)


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("mlflow:5000", "is no MLflow server"),
        ("sqlite:///mlruns.db", "is no MLflow server"),
        ("/mlruns", "is no MLflow server"),
        ("databricks", "cannot be searched by a tag"),
        ("databricks://profile", "cannot be searched by a tag"),
        ("https://", "is no MLflow server"),
        ("http://[::1", "is no MLflow server"),
        ("https://mlflow\n.example.com", "is no MLflow server"),
        ("https://ada:secret-word@mlflow.example.com", "credentials do not belong in the URL"),
        ("postgresql://ada:secret-word@db/mlflow", "is no MLflow server"),
        ("ada:secret-word@mlflow:5000", "is no MLflow server"),
        ("https://ada:secret-word@", "is no MLflow server"),
    ],
)
def test_a_url_that_cannot_work_is_refused_before_anything_runs(uri: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        compiled(tracking=Mlflow(uri))
    assert "secret-word" not in str(caught.value)
    with pytest.raises(UsageError, match=reason):
        RegisterModel(name="register", model="digits", image="tools", uri=uri)


@pytest.mark.parametrize("uri", ["http://127.0.0.1:5000", "https://h/prefix"])
def test_urls_of_servers_are_accepted(uri: str) -> None:
    assert variables(container(compiled(tracking=Mlflow(uri))))["MLFLOW_TRACKING_URI"] == uri


@pytest.mark.parametrize("experiment", ["x" * 501, "two\nlines", "\x1b[2J"])
def test_an_experiment_that_mlflow_refuses_is_refused_here(experiment: str) -> None:
    with pytest.raises(UsageError, match="experiment="):
        compiled(tracking=Mlflow(URI, experiment=experiment))


@pytest.mark.parametrize("model", ["", "a/b", "a:b", "it's", "<b>x</b>", "x" * 1024, " x", "x\x1b[2J", "ü"])
def test_a_model_name_that_registries_refuse_is_refused_here(model: str) -> None:
    with pytest.raises(UsageError, match="model name") as caught:
        RegisterModel(name="register", model=model, image="tools")
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("alias", ["latest", "v1", "V22", "a b", "1st", "x" * 101, "<i>"])
def test_an_alias_that_mlflow_reserves_is_refused_here(alias: str) -> None:
    with pytest.raises(UsageError, match="alias"):
        RegisterModel(name="register", model="digits", alias=alias, image="tools")


def test_register_model_is_a_step_with_a_program_of_its_own() -> None:
    fit = Train(name="fit", image="trainer", command=["fit"], outputs=Artifact(name="model", path="/m"))
    register = RegisterModel(name="register", model="digits", alias="champion", image="tools", uri=URI)
    with Pipeline("digits", store="s3://ml-runs/tiphys") as pipeline:
        register(model=fit())
    manifest = pipeline.compile()
    part = container(manifest, "register-run")
    assert part["command"] == ["python", "-m", "tiphys.tracking.register"]
    assert variables(part)["TIPHYS_REGISTRATION"] == '{"model":"digits","alias":"champion"}'
    assert variables(part)["MLFLOW_TRACKING_URI"] == URI
    spec = CompiledPipeline.from_manifest(manifest).steps["register"]
    assert spec.registration is not None
    assert (spec.registration.model, spec.registration.alias, spec.cache) == ("digits", "champion", False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"command": ["mine"]}, "drop command"),
        ({"inputs": [Parameter(name="x")]}, "drop inputs"),
        ({"image": ""}, "needs image="),
        ({"cache": True}, "drop cache"),
    ],
)
def test_register_model_takes_no_other_program(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        RegisterModel(**{"name": "register", "model": "digits", "image": "tools", **options})


def test_the_ready_pipeline_takes_it_as_its_register() -> None:
    program = Program(image="tools", command=["run"])
    register = RegisterModel(name="register", model="digits", image="tools")
    pipeline = train_pipeline(
        "train",
        store="s3://ml-runs/tiphys",
        source="s3://raw",
        validate=program,
        preprocess=program,
        train=program,
        register=register,
    )
    [task] = [one for one in by_name(pipeline.compile())["main"]["dag"]["tasks"] if one["name"] == "register"]
    assert [one["name"] for one in task["arguments"]["artifacts"]] == ["model"]
