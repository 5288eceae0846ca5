"""Every way out of a pipeline is the compiled one."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hera.exceptions import HeraException
from hera.workflows import DAG, Container, Parameter, WorkflowsService, models
from hera.workflows.async_service import AsyncWorkflowsService
from support.builders.authored_workflows import train, workflow
from support.servers.argo_server import ArgoServer, serving

from hera_pipelines import CronPipeline, Pipeline, PluginTemplate, Step, step
from hera_pipelines.compile import CompileOptions, compile_workflow
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest, find_template

SCRIPT = """
from hera_pipelines import Pipeline, Train

with Pipeline("digits") as pipeline:
    Train(name="fit", image="i", command=["fit"])()
"""


@step()
def prep(source: str = "raw") -> None:
    _ = source


def digits(**fields: Any) -> Pipeline:
    with Pipeline("digits", store="s3://ml-runs/tiphys", namespace="ml", **fields) as pipeline:
        prep()
    return pipeline


def nightly(**fields: Any) -> CronPipeline:
    with CronPipeline("nightly", store="s3://ml-runs/t", namespace="ml", schedules=["0 2 * * *"], **fields) as pipeline:
        prep()
    return pipeline


@pytest.fixture
def argo() -> Iterator[ArgoServer]:
    with serving() as server:
        yield server


def service(argo: ArgoServer) -> WorkflowsService:
    return WorkflowsService(host=argo.url, token="secret", namespace="ml")


def test_dict_yaml_and_file_hold_the_same_compiled_workflow(tmp_path: Path) -> None:
    pipeline = digits()

    compiled = pipeline.to_dict()

    assert list(CompiledPipeline.from_manifest(compiled).steps) == ["prep"]
    assert yaml.safe_load(pipeline.to_yaml()) == compiled
    assert yaml.safe_load(pipeline.to_file(tmp_path).read_text()) == compiled
    assert pipeline.compile() == compiled


def test_building_twice_gives_the_same() -> None:
    pipeline = digits(on_exit="bye")
    with pipeline:
        Container(name="bye", image="i")

    assert pipeline.to_dict() == pipeline.to_dict()


def test_a_built_model_has_the_steps_templates() -> None:
    built = digits().build()

    assert built.spec.templates
    assert [t.name for t in built.spec.templates] == ["main", "prep", "tiphys-exit", "tiphys-finalize", "tiphys-wake"]


@pytest.mark.parametrize(
    ("fields", "metadata", "name"),
    [
        ({"pipeline": "digits"}, {"generateName": "digits-"}, "digits"),
        ({"pipeline": "digits", "generate_name": "d-"}, {"generateName": "d-"}, "digits"),
        ({"generate_name": "digits-"}, {"generateName": "digits-"}, "digits"),
        ({"name": "digits"}, {"name": "digits"}, "digits"),
    ],
)
def test_a_pipeline_has_a_name_however_it_is_given(fields: Any, metadata: Any, name: str) -> None:
    with Pipeline(**fields) as pipeline:
        prep()

    compiled = pipeline.to_dict()
    assert {k: v for k, v in compiled["metadata"].items() if k in ("name", "generateName")} == metadata
    assert (compiled["kind"], CompiledPipeline.from_manifest(compiled).name) == ("Workflow", name)


def test_the_store_can_be_another_for_one_compilation() -> None:
    pipeline = digits()

    assert CompiledPipeline.from_manifest(pipeline.compile(store="file:///tmp/s")).store == "file:///tmp/s"
    assert CompiledPipeline.from_manifest(pipeline.compile()).store == "s3://ml-runs/tiphys"


def test_the_body_of_a_foreign_plugin_survives() -> None:
    body = {"slack": {"text": "{{inputs.parameters.text}}", "options": {"nested": [1, 2]}}}
    with Pipeline("digits", entrypoint="main") as pipeline:
        tell = PluginTemplate(name="tell", inputs=Parameter(name="text"), body=body)
        with DAG(name="main"):
            prep() >> tell(arguments={"text": "done"})

    assert find_template(pipeline.to_dict(), "tell")["plugin"] == body


def test_a_body_that_hera_dropped_is_refused() -> None:
    with Pipeline("digits", entrypoint="main") as pipeline:
        pipeline.templates.append(models.Template(name="tell", plugin=models.Plugin(slack={})))
        with DAG(name="main"):
            prep()

    with pytest.raises(UsageError, match="declare it with PluginTemplate"):
        pipeline.to_dict()


@pytest.mark.parametrize("body", [{}, {"a": {}, "b": {}}])
def test_a_plugin_body_has_one_key(body: Any) -> None:
    with pytest.raises(UsageError, match="exactly one key"):
        PluginTemplate(name="tell", body=body)


def test_create_sends_the_compiled_workflow_with_its_bodies(argo: ArgoServer) -> None:
    pipeline = digits(workflows_service=service(argo))

    created = pipeline.create()

    call = argo.calls[0]
    assert (call.method, call.path, call.token) == ("POST", "/api/v1/workflows/ml", "Bearer secret")
    assert call.body == {"workflow": pipeline.compile() | {"metadata": call.body["workflow"]["metadata"]}}
    assert find_template(call.body["workflow"], "tiphys-finalize")["plugin"]["tiphys"]["op"] == "finalize"
    assert (created.metadata.name, pipeline.name) == ("made-by-server", "made-by-server")


def test_lint_sends_the_compiled_workflow(argo: ArgoServer) -> None:
    pipeline = digits(workflows_service=service(argo))

    pipeline.lint()

    assert argo.calls[0].path == "/api/v1/workflows/ml/lint"
    assert argo.calls[0].body == {"workflow": pipeline.compile()}


def test_the_asynchronous_ways_out_are_compiled_too(argo: ArgoServer) -> None:
    async def out() -> None:
        async with AsyncWorkflowsService(host=argo.url, token="secret") as client:
            pipeline = digits(workflows_service=client)
            await pipeline.async_lint()
            await pipeline.async_create(wait=False)
            cron = nightly(workflows_service=client)
            await cron.async_create()
            await cron.async_lint()
            await cron.async_update()

    asyncio.run(out())

    assert [(call.method, call.path) for call in argo.calls] == [
        ("POST", "/api/v1/workflows/ml/lint"),
        ("POST", "/api/v1/workflows/ml"),
        ("POST", "/api/v1/cron-workflows/ml"),
        ("POST", "/api/v1/cron-workflows/ml/lint"),
        ("GET", "/api/v1/cron-workflows/ml/nightly"),
        ("POST", "/api/v1/cron-workflows/ml"),
    ]
    for call in argo.calls:
        assert call.method == "GET" or '"op": "finalize"' in json.dumps(call.body)


def test_a_schedule_is_created_and_updated_with_its_bodies(argo: ArgoServer) -> None:
    cron = nightly(workflows_service=service(argo))
    cron.create()
    path = "/api/v1/cron-workflows/ml/nightly"
    argo.objects[path] = {**argo.calls[0].body["cronWorkflow"], "metadata": {"name": "nightly", "resourceVersion": "7"}}

    cron.update()
    cron.lint()

    put = argo.calls[2]
    assert (put.method, put.path) == ("PUT", path)
    assert put.body["cronWorkflow"]["metadata"]["resourceVersion"] == "7"
    assert '"op": "finalize"' in json.dumps(put.body)
    assert argo.calls[3].path == "/api/v1/cron-workflows/ml/lint"


def test_the_servers_refusal_is_heras_exception(argo: ArgoServer) -> None:
    argo.refusal = (400, "templates.main is not valid")

    with pytest.raises(HeraException, match="main is not valid"):
        digits(workflows_service=service(argo)).create()


def _without_host(pipeline: Pipeline) -> None:
    pipeline.workflows_service = WorkflowsService()


def _without_namespace(pipeline: Pipeline) -> None:
    pipeline.workflows_service, pipeline.namespace = WorkflowsService(host="http://127.0.0.1:1"), None


def _asynchronous(pipeline: Pipeline) -> None:
    pipeline.workflows_service = AsyncWorkflowsService(host="http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_without_host, "no Argo server to call"),
        (_without_namespace, "no namespace is given"),
        (_asynchronous, "use async_create or async_lint"),
    ],
)
def test_a_setting_missing_for_a_submission_is_named(spoil: Callable[[Pipeline], None], words: str) -> None:
    pipeline = digits()
    spoil(pipeline)

    with pytest.raises(UsageError, match=words):
        pipeline.create()


def test_async_create_needs_an_asynchronous_service() -> None:
    with pytest.raises(UsageError, match="AsyncWorkflowsService"):
        asyncio.run(digits(workflows_service=WorkflowsService(host="http://127.0.0.1:1")).async_create())


def test_a_cron_pipeline_is_a_schedule_around_the_compiled_workflow() -> None:
    cron = nightly(timezone="UTC", labels={"team": "vision"})

    compiled = cron.to_dict()

    assert (compiled["kind"], compiled["metadata"]["name"]) == ("CronWorkflow", "nightly")
    assert compiled["spec"]["concurrencyPolicy"] == "Forbid"
    assert compiled["spec"]["workflowMetadata"]["labels"] == {"team": "vision", "tiphys.dev/pipeline": "nightly"}
    assert compiled["spec"]["workflowSpec"]["onExit"] == "tiphys-exit"
    assert yaml.safe_load(cron.to_yaml()) == compiled
    assert cron.build().spec.schedules == ["0 2 * * *"]


def test_a_workflow_of_a_schedule_can_be_started_now() -> None:
    cron = nightly()

    started: Manifest = cron.workflow(store="file:///tmp/s")

    assert (started["kind"], started["metadata"]["generateName"]) == ("Workflow", "nightly-")
    assert "name" not in started["metadata"]
    pipeline = CompiledPipeline.from_manifest(started)
    assert (pipeline.name, pipeline.store, list(pipeline.steps)) == ("nightly", "file:///tmp/s", ["prep"])


def test_a_schedule_needs_a_name() -> None:
    with CronPipeline(schedules=["0 2 * * *"]) as cron:
        prep()

    with pytest.raises(UsageError, match="needs a name"):
        cron.to_dict()


def test_a_workflow_written_as_yaml_can_become_a_pipeline() -> None:
    written = workflow(train("fit"))

    pipeline = Pipeline.from_dict(written)

    assert isinstance(pipeline, Pipeline)
    assert pipeline.compile(store="s3://ml-runs/tiphys") == compile_workflow(
        written, CompileOptions(store="s3://ml-runs/tiphys")
    )


def test_pipelines_are_equal_when_they_compile_to_the_same() -> None:
    assert digits() == digits()
    assert digits() != digits(labels={"team": "vision"})


def test_containers_made_inside_the_pipeline_are_its_templates_once() -> None:
    with Pipeline("digits") as pipeline:
        fit = Step(name="fit", image="i")
        fit(name="first")
        fit(name="second")

    assert [t.name for t in pipeline.templates] == ["fit", "main"]


def test_calls_of_one_function_share_its_template_and_a_gate_gives_each_its_own() -> None:
    with Pipeline("digits") as pipeline:
        check = Step(name="check", image="i", gate=True)
        for number in range(3):
            prep(name=f"prep-{number}") >> check(name=f"check-{number}")
    compiled = pipeline.compile(store="s3://ml-runs/t")

    calls = {task["name"]: task["template"] for task in CompiledPipeline.from_manifest(compiled).tasks()}
    assert calls == {f"prep-{number}": "prep" for number in range(3)} | {f"check-{n}": f"check-{n}" for n in range(3)}
    assert list(CompiledPipeline.from_manifest(compiled).steps) == list(calls)


def test_an_unknown_workflow_parameter_is_refused_with_the_known_ones() -> None:
    with Pipeline("digits", arguments=[Parameter(name="loss", value="1"), Parameter(name="lr")]) as pipeline:
        assert pipeline.get_parameter("lr").value == "{{workflow.parameters.lr}}"
        with pytest.raises(UsageError, match=r"'digits' has no parameter 'los'; did you mean 'loss'\? It has: "):
            pipeline.get_parameter("los")
    with pytest.raises(UsageError, match="has no parameter 'lr'; it has: none"):
        Pipeline("digits").get_parameter("lr")


def run_with_python(folder: Path, text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "digits.py").write_text(text)
    environ = {name: value for name, value in os.environ.items() if name != "TIPHYS_STORE"} | variables
    command = [sys.executable, "digits.py"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=300)


def test_file_that_is_run_with_python_says_which_command_runs_its_pipeline(tmp_path: Path) -> None:
    done = run_with_python(tmp_path, SCRIPT)
    assert (done.returncode, done.stdout) == (0, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("tiphys: ")
    assert line.endswith(
        "digits.py defines pipeline 'digits'; `tiphys run " + str(tmp_path / "digits.py") + "` runs it"
    )


def test_file_that_is_run_with_python_and_prints_its_pipeline_says_no_more(tmp_path: Path) -> None:
    done = run_with_python(tmp_path, f"{SCRIPT}\nprint(pipeline.to_yaml())", TIPHYS_STORE="s3://ml-runs/t")
    assert (done.returncode, done.stderr) == (0, "")
    assert "tiphys.dev/store: s3://ml-runs/t" in done.stdout


@pytest.mark.parametrize("variable", ["TIPHYS_STEP", "ARGO_NODE_ID"])
def test_file_whose_program_is_a_step_says_nothing_of_its_pipeline(tmp_path: Path, variable: str) -> None:
    assert run_with_python(tmp_path, SCRIPT, **{variable: "fit"}).stderr == ""


def test_store_of_a_pipeline_takes_precedence_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIPHYS_STORE", "s3://of-the-variable")
    assert CompiledPipeline.from_manifest(digits().to_dict()).store == "s3://ml-runs/tiphys"
    assert CompiledPipeline.from_manifest(digits().compile(store="s3://given")).store == "s3://given"
