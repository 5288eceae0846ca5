"""The shape of a compiled training step, as it ran on a real Argo: same nodes, same decisions.

The plugin answers by script: 75 is tried again, anything else is settled.
"""

from typing import Any

import pytest
from support.scripted_plugin import Body, ScriptedPlugin, failed, succeeded
from support.workflows import Bench, call, dag, plugin, shell, workflow


def ended(task: str) -> str:
    return " || ".join(f"{task}.{result}" for result in ("Succeeded", "Failed", "Errored", "Skipped"))


def answer(body: Body) -> Body:
    match body["op"]:
        case "admit":
            return succeeded(run=body["go"], pod_patch='{"terminationGracePeriodSeconds": 5}')
        case "settle" if body["exit"] == "75":
            return failed("try again")
        case "conclude":
            return succeeded(model=f"model of {body['status']}")
    return succeeded()


def train_shape() -> dict[str, Any]:
    passed = {name: f"{{{{inputs.parameters.{name}}}}}" for name in ("go", "code")}
    step = dag(
        call("attempts", "attempt", passed),
        call("conclude", "conclude", {"st": "{{tasks.attempts.status}}"}, depends=ended("attempts")),
        name="step",
        inputs={"parameters": [{"name": "go"}, {"name": "code"}]},
    )
    step["outputs"] = {
        "parameters": [{"name": "model", "valueFrom": {"parameter": "{{tasks.conclude.outputs.parameters.model}}"}}]
    }
    told = {"st": "{{tasks.run.status}}", "ec": "{{=tasks['run'].exitCode ?? '-1'}}", "id": "{{tasks.run.id}}"}
    patched = {"patch": "{{tasks.admit.outputs.parameters.pod-patch}}", "retry": "{{retries}}"}
    attempt = dag(
        call("admit", "admit", {"go": passed["go"]}),
        call(
            "run",
            "run",
            {**patched, "code": passed["code"]},
            depends="admit",
            when="{{tasks.admit.outputs.parameters.run}} == true",
        ),
        call("settle", "settle", told, depends=ended("run")),
        name="attempt",
        inputs=step["inputs"],
        retryStrategy={"limit": "50", "retryPolicy": "Always", "backoff": {"duration": "1s", "factor": "2"}},
    )
    source = "[ {{inputs.parameters.retry}} -ge 1 ] || exit {{inputs.parameters.code}}"
    node = {"node": "{{node.name}}"}
    return workflow(
        dag(
            call("prep", "step", {"go": "false", "code": "0"}),
            call(
                "sweep",
                "step",
                {"go": "true", "code": "{{item.code}}"},
                depends="prep",
                withItems=[{"lr": "0.1", "code": "75"}, {"lr": "0.2", "code": "1"}],
            ),
            call("use", "use", {"model": "{{tasks.prep.outputs.parameters.model}}"}, depends="prep && sweep"),
        ),
        step,
        attempt,
        plugin("admit", "run", "pod-patch", inputs=("go",), op="admit", go=passed["go"], **node),
        plugin(
            "settle",
            inputs=("st", "ec", "id"),
            op="settle",
            status="{{inputs.parameters.st}}",
            exit="{{inputs.parameters.ec}}",
            **node,
        ),
        plugin("conclude", "model", inputs=("st",), op="conclude", status="{{inputs.parameters.st}}", **node),
        plugin("bye", op="finalize", status="{{workflow.status}}", **node),
        shell(source, "run", "patch", "retry", "code", podSpecPatch="{{inputs.parameters.patch}}"),
        shell("echo {{inputs.parameters.model}}", "use", "model"),
        onExit="bye",
    )


@pytest.fixture(scope="module")
def scripted_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, list[Body]]:
    folder = tmp_path_factory.mktemp("shape")
    with ScriptedPlugin(answer) as scripted:
        bench = Bench(folder, scripted, code=folder)
        assert bench.run(train_shape()) == "Succeeded"
        return bench, scripted.bodies


def test_plugin_nodes_have_the_names_seen_on_argo(scripted_run: tuple[Bench, list[Body]]) -> None:
    _, bodies = scripted_run
    first, second = "wf.sweep(0:code:75,lr:0.1)", "wf.sweep(1:code:1,lr:0.2)"
    assert sorted(body["node"] for body in bodies) == sorted(
        [
            "wf.prep.attempts(0).admit",
            "wf.prep.attempts(0).settle",
            "wf.prep.conclude",
            f"{first}.attempts(0).admit",
            f"{first}.attempts(0).settle",
            f"{first}.attempts(1).admit",
            f"{first}.attempts(1).settle",
            f"{first}.conclude",
            f"{second}.attempts(0).admit",
            f"{second}.attempts(0).settle",
            f"{second}.conclude",
            "wf.onExit",
        ]
    )


def test_settle_is_told_how_the_program_ended(scripted_run: tuple[Bench, list[Body]]) -> None:
    _, bodies = scripted_run
    told = {body["node"]: (body["status"], body["exit"]) for body in bodies if body["op"] == "settle"}
    assert told == {
        "wf.prep.attempts(0).settle": ("Skipped", "-1"),
        "wf.sweep(0:code:75,lr:0.1).attempts(0).settle": ("Failed", "75"),
        "wf.sweep(0:code:75,lr:0.1).attempts(1).settle": ("Succeeded", "0"),
        "wf.sweep(1:code:1,lr:0.2).attempts(0).settle": ("Failed", "1"),
    }


def test_outputs_of_a_skipped_step_come_from_conclude(scripted_run: tuple[Bench, list[Body]]) -> None:
    bench, _ = scripted_run
    assert bench.logs("use") == ["model of Succeeded\n"]
    assert bench.phases()["wf.prep.attempts(0).run"] == "Skipped"
