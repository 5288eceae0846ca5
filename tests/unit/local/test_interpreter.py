"""The shape of a compiled training: the nodes and decisions that Argo's source gives it.

The plugin answers by script: after 75 comes another try, after another failure the step has failed.
"""

from typing import Any

import pytest
from support.servers.scripted_plugin import Body, ScriptedPlugin, failed, succeeded
from support.stories.local_engine import Bench, call, dag, plugin, shell, workflow

AFTER_RUN = "run.Succeeded || run.Failed || run.Errored || run.Skipped"


def answer(body: Body) -> Body:
    match body["op"]:
        case "admit":
            return succeeded(run=body["go"], pod_patch='{"terminationGracePeriodSeconds": 5}')
        case "conclude" if body["exit"] == "75":
            return {"node": {"phase": "Error", "message": "try again"}}
        case "conclude" if body["status"] == "Failed":
            return failed("for good")
        case "conclude":
            return succeeded(model=f"model of {body['status']}")
    return succeeded()


def train_shape() -> dict[str, Any]:
    passed = {name: f"{{{{inputs.parameters.{name}}}}}" for name in ("go", "code")}
    outcome = {"st": "{{tasks.run.status}}", "ec": "{{=tasks['run'].exitCode ?? '-1'}}", "id": "{{tasks.run.id}}"}
    patched = {"patch": "{{tasks.admit.outputs.parameters.pod-patch}}", "retry": "{{retries}}"}
    step = dag(
        call("admit", "admit", {"go": passed["go"]}),
        call(
            "run",
            "run",
            {**patched, "code": passed["code"]},
            depends="admit",
            when="{{tasks.admit.outputs.parameters.run}} == true",
        ),
        call("conclude", "conclude", outcome, depends=AFTER_RUN),
        name="step",
        inputs={"parameters": [{"name": "go"}, {"name": "code"}]},
        retryStrategy={"limit": "50", "retryPolicy": "OnError", "backoff": {"duration": "1s", "factor": "2"}},
    )
    step["outputs"] = {
        "parameters": [{"name": "model", "valueFrom": {"parameter": "{{tasks.conclude.outputs.parameters.model}}"}}]
    }
    source = "[ {{inputs.parameters.retry}} -ge 1 ] || exit {{inputs.parameters.code}}"
    node = {"node": "{{node.name}}"}
    arguments = {"model": "{{tasks.prep.outputs.parameters.model}}", "status": "{{tasks.lost.status}}"}
    return workflow(
        dag(
            call("prep", "step", {"go": "false", "code": "0"}),
            call(
                "sweep",
                "step",
                {"go": "true", "code": "{{item.code}}"},
                depends="prep",
                withItems=[{"lr": "0.1", "code": "75"}, {"lr": "0.2", "code": "0"}],
            ),
            call("lost", "step", {"go": "true", "code": "1"}, depends="prep"),
            call("use", "use", arguments, depends="prep && sweep && lost.Failed"),
        ),
        step,
        plugin("admit", "run", "pod-patch", inputs=("go",), op="admit", go=passed["go"], **node),
        plugin(
            "conclude",
            "model",
            inputs=("st", "ec", "id"),
            op="conclude",
            status="{{inputs.parameters.st}}",
            exit="{{inputs.parameters.ec}}",
            **node,
        ),
        plugin("bye", op="finalize", status="{{workflow.status}}", **node),
        shell(source, "run", "patch", "retry", "code", podSpecPatch="{{inputs.parameters.patch}}"),
        shell("echo {{inputs.parameters.model}} {{inputs.parameters.status}}", "use", "model", "status"),
        onExit="bye",
    )


@pytest.fixture(scope="module")
def scripted_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, list[Body]]:
    folder = tmp_path_factory.mktemp("shape")
    with ScriptedPlugin(answer) as scripted:
        bench = Bench(folder, scripted, code=folder)
        assert bench.run(train_shape()) == "Succeeded"
        return bench, scripted.bodies


def test_plugin_nodes_have_the_names_of_argo(scripted_run: tuple[Bench, list[Body]]) -> None:
    _, bodies = scripted_run
    tries = (
        "wf.prep(0)",
        "wf.lost(0)",
        "wf.sweep(0:code:75,lr:0.1)(0)",
        "wf.sweep(0:code:75,lr:0.1)(1)",
        "wf.sweep(1:code:0,lr:0.2)(0)",
    )
    calls = [f"{name}.{op}" for name in tries for op in ("admit", "conclude")]
    assert sorted(body["node"] for body in bodies) == sorted([*calls, "wf.onExit"])


def test_conclude_gets_the_end_of_the_program_of_each_try(scripted_run: tuple[Bench, list[Body]]) -> None:
    _, bodies = scripted_run
    ends = {body["node"]: (body["status"], body["exit"]) for body in bodies if body["op"] == "conclude"}
    assert ends == {
        "wf.prep(0).conclude": ("Skipped", "-1"),
        "wf.lost(0).conclude": ("Failed", "1"),
        "wf.sweep(0:code:75,lr:0.1)(0).conclude": ("Failed", "75"),
        "wf.sweep(0:code:75,lr:0.1)(1).conclude": ("Succeeded", "0"),
        "wf.sweep(1:code:0,lr:0.2)(0).conclude": ("Succeeded", "0"),
    }


def test_a_try_in_error_is_repeated_and_one_that_failed_ends_its_step(scripted_run: tuple[Bench, list[Body]]) -> None:
    bench, _ = scripted_run
    phases, item = bench.phases(), "wf.sweep(0:code:75,lr:0.1)"
    assert [phases[name] for name in (f"{item}(0)", f"{item}(1)", item)] == ["Error", "Succeeded", "Succeeded"]
    assert [phases[name] for name in ("wf.lost(0)", "wf.lost")] == ["Failed", "Failed"]
    kinds = {change.node: change.kind for change in bench.changes}
    assert [kinds[name] for name in ("wf.lost", "wf.lost(0)", "wf.lost(0).conclude")] == ["Retry", "DAG", "Plugin"]


def test_outputs_of_a_skipped_step_come_from_conclude(scripted_run: tuple[Bench, list[Body]]) -> None:
    bench, _ = scripted_run
    assert bench.logs("use") == ["model of Skipped Failed\n"]
    assert bench.phases()["wf.prep(0).run"] == "Skipped"
