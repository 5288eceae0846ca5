"""Attempts that are DAGs under the retryStrategy of a training, and their pauses.

| run       | conclude  | attempt   | then         |
|-----------|-----------|-----------|--------------|
| Succeeded | Succeeded | Succeeded | the end      |
| Failed    | Succeeded | Succeeded | the end      |
| Failed    | Error     | Error     | the next one |
| Failed    | Failed    | Failed    | the end      |
| Skipped   | Succeeded | Succeeded | the end      |
"""

from pathlib import Path
from typing import Any

import pytest
from support.servers.scripted_plugin import Body, ScriptedPlugin, failed, succeeded
from support.stories.local_engine import Bench, Manifest, call, dag, plugin, shell, workflow

from hera_pipelines.local.nodes import NodeChange

ENDED = "run.Succeeded || run.Failed || run.Errored || run.Skipped"
EITHER = "tasks.run.status == 'Succeeded' ? tasks.run.outputs.{0}['x-y'] : tasks.admit.outputs.{0}['x-y']"
ON_ERROR = {"limit": "9", "retryPolicy": "OnError", "backoff": {"duration": "1s"}}


def suspend(name: str, duration: str = "300ms", **rest: Any) -> Manifest:
    return {"name": name, "suspend": {"duration": duration}, **rest}


def attempts_workflow(source: str, pause: str = "300ms", **spec: Any) -> Manifest:
    """``main`` → ``fit``, whose attempts have their outputs from ``run`` or from ``admit``."""
    admit = plugin("admit", "run", "x-y", op="admit")
    admit["outputs"]["artifacts"] = [{"name": "x-y", "path": "/unused", "optional": True}]
    run = shell(source, "run", "retry")
    key = {"s3": {"key": "made/{{inputs.parameters.retry}}"}, "archive": {"none": {}}}
    run["outputs"] = {
        "parameters": [{"name": "x-y", "valueFrom": {"path": "/tmp/p"}}],
        "artifacts": [{"name": "x-y", "path": "/tmp/a", **key}],
    }
    ended = {"code": "{{=tasks['run'].exitCode ?? '-1'}}", "status": "{{tasks.run.status}}"}
    fit = dag(
        call("admit"),
        call("wake"),
        call(
            "run",
            parameters={"retry": "{{retries}}"},
            depends="admit.Succeeded",
            when="{{tasks.admit.outputs.parameters.run}} == true",
        ),
        call("conclude", parameters=ended, depends=ENDED),
        name="fit",
        retryStrategy=ON_ERROR,
        outputs={
            "parameters": [{"name": "x", "valueFrom": {"expression": EITHER.format("parameters")}}],
            "artifacts": [{"name": "x", "fromExpression": EITHER.format("artifacts")}],
        },
    )
    conclude = plugin("conclude", inputs=("code", "status"), op="conclude", node="{{node.name}}")
    conclude["plugin"]["tiphys"] |= {key: f"{{{{inputs.parameters.{key}}}}}" for key in ("code", "status")}
    use = shell("echo {{inputs.parameters.x}}; cat /tmp/in", "use", "x")
    use["inputs"]["artifacts"] = [{"name": "x", "path": "/tmp/in"}]
    main = dag(call("fit"), call("use", parameters={"x": "{{tasks.fit.outputs.parameters.x}}"}, depends="fit"))
    taken = [{"name": "x", "from": "{{tasks.fit.outputs.artifacts.x}}"}]
    main["dag"]["tasks"][1]["arguments"]["artifacts"] = taken
    return workflow(main, fit, admit, conclude, suspend("wake", pause), run, use, **spec)


def answer(body: Body, run: str = "true") -> Body:
    if body["op"] == "admit":
        reply = succeeded(run=run, **{"x-y": "reused"})
        reply["node"]["outputs"]["artifacts"] = [{"name": "x-y", "s3": {"key": "reused"}}]
        return reply
    if body["code"] == "75":
        return {"node": {"phase": "Error", "message": "try again"}}
    return failed("for good") if body["code"] == "2" else succeeded()


MAKE = "echo made > /tmp/p; echo made-file > /tmp/a; exit {}"
AGAIN = "$(( {{inputs.parameters.retry}} >= 1 ? 0 : 75 ))"


def run_attempts(folder: Path, source: str, run: str = "true") -> tuple[Bench, ScriptedPlugin, str]:
    with ScriptedPlugin(lambda body: answer(body, run)) as scripted:
        bench = Bench(folder, scripted, code=folder)
        bench.store.create("reused", b"reused-file\n")
        return bench, scripted, bench.run(attempts_workflow(source))


def test_a_leaf_in_error_makes_the_next_attempt_and_a_good_one_ends_them(tmp_path: Path) -> None:
    bench, scripted, phase = run_attempts(tmp_path, MAKE.format(AGAIN))
    assert phase == "Succeeded"
    first, second = "wf.fit(0)", "wf.fit(1)"
    phases = bench.phases()
    assert [phases[f"{first}{task}"] for task in ("", ".admit", ".wake", ".run", ".conclude")] == [
        "Error",
        "Succeeded",
        "Succeeded",
        "Failed",
        "Error",
    ]
    assert {phases[f"{second}{task}"] for task in ("", ".admit", ".wake", ".run", ".conclude")} == {"Succeeded"}
    assert phases["wf.fit"] == "Succeeded"
    kinds = {change.node: change.kind for change in bench.changes}
    assert [kinds[name] for name in ("wf.fit", first, f"{first}.wake")] == ["Retry", "DAG", "Suspend"]
    ended = [(body["node"], body["code"], body["status"]) for body in scripted.bodies if body["op"] == "conclude"]
    assert ended == [(f"{first}.conclude", "75", "Failed"), (f"{second}.conclude", "0", "Succeeded")]
    assert bench.logs("use") == ["made\nmade-file\n"]


def test_a_leaf_that_failed_for_good_ends_the_attempts(tmp_path: Path) -> None:
    bench, scripted, phase = run_attempts(tmp_path, MAKE.format(2))
    assert phase == "Failed"
    phases = bench.phases()
    assert [phases[name] for name in ("wf.fit(0).conclude", "wf.fit(0)", "wf.fit")] == ["Failed"] * 3
    assert "wf.fit(1)" not in phases
    assert [body["op"] for body in scripted.bodies] == ["admit", "conclude"]


def test_an_admit_that_failed_starts_nothing_and_ends_the_attempts(tmp_path: Path) -> None:
    with ScriptedPlugin(lambda _: failed("Rejected: no such pool")) as scripted:
        bench = Bench(tmp_path, scripted, code=tmp_path)
        assert bench.run(attempts_workflow(MAKE.format(1))) == "Failed"
    phases = bench.phases()
    assert [phases[name] for name in ("wf.fit(0).run", "wf.fit(0).conclude", "wf.fit(0)", "wf.fit")] == [
        "Omitted",
        "Omitted",
        "Failed",
        "Failed",
    ]
    assert "wf.fit(1)" not in phases


@pytest.mark.parametrize(
    ("run", "source", "ended"),
    [("true", MAKE.format(1), ("1", "Failed")), ("false", MAKE.format(1), ("-1", "Skipped"))],
)
def test_a_good_leaf_ends_the_attempts_and_what_run_did_not_make_comes_from_admit(
    tmp_path: Path, run: str, source: str, ended: tuple[str, str]
) -> None:
    bench, scripted, phase = run_attempts(tmp_path, source, run)
    assert phase == "Succeeded"
    assert bench.phases()["wf.fit(0).run"] == ended[1]
    assert [(body["code"], body["status"]) for body in scripted.bodies if body["op"] == "conclude"] == [ended]
    assert bench.logs("use") == ["reused\nreused-file\n"]


def test_an_attempt_whose_output_has_no_value_is_an_error_and_is_tried_again(tmp_path: Path) -> None:
    attempt = dag(call("pause"), name="attempt", retryStrategy={**ON_ERROR, "limit": 1})
    attempt["outputs"] = {"artifacts": [{"name": "x", "fromExpression": "tasks.pause.outputs.artifacts['x']"}]}
    bench = Bench(tmp_path)
    assert bench.run(workflow(dag(call("fit", "attempt")), attempt, suspend("pause"))) == "Error"
    assert [bench.phases()[f"wf.fit({number})"] for number in (0, 1)] == ["Error", "Error"]
    assert "cannot take 'artifacts' of nil" in bench.last("wf.fit(1)").message


# --- pauses ---


def test_a_pause_runs_and_succeeds_without_a_message(tmp_path: Path) -> None:
    pause = suspend("pause", "{{inputs.parameters.time}}", inputs={"parameters": [{"name": "time"}]})
    bench = Bench(tmp_path)
    assert bench.run(workflow(dag(call("pause", parameters={"time": "20"})), pause)) == "Succeeded"
    changes = [(change.kind, change.phase, change.message) for change in bench.changes if change.node == "wf.pause"]
    assert changes == [("Suspend", "Running", ""), ("Suspend", "Succeeded", "")]
    [node] = [node for node in bench.status()["nodes"].values() if node["name"] == "wf.pause"]
    assert (node["type"], node["phase"]) == ("Suspend", "Succeeded")


def test_a_pause_whose_parameter_is_no_duration_is_an_error(tmp_path: Path) -> None:
    pause = suspend("pause", "{{inputs.parameters.time}}", inputs={"parameters": [{"name": "time"}]})
    bench = Bench(tmp_path)
    assert bench.run(workflow(dag(call("pause", parameters={"time": "noon"})), pause)) == "Error"
    assert "'noon' is not a duration of Argo" in bench.last("wf.pause").message


def test_a_timer_that_wakes_argo_is_not_waited_for(tmp_path: Path) -> None:
    timer = suspend("tiphys-wake", "300h")
    assert Bench(tmp_path).run(workflow(dag(call("tiphys-wake")), timer, activeDeadlineSeconds=600)) == "Succeeded"


def stop_when_suspended(bench: Bench, node: str, times: int = 1) -> None:
    def react(change: NodeChange) -> None:
        if change.node == node and change.phase == "Running":
            for _ in range(times):
                bench.engine.stop()

    bench.reactions.append(react)


def test_stop_ends_a_pause_and_not_that_of_the_exit_handler(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    stop_when_suspended(bench, "wf.pause")
    manifest = workflow(
        dag(call("pause"), call("after", "pause", depends="pause.Failed")),
        suspend("pause", "3h"),
        suspend("bye"),
        onExit="bye",
    )
    assert bench.run(manifest) == "Failed"
    assert (bench.last("wf.pause").phase, bench.last("wf.pause").message) == ("Failed", "Stopped with strategy 'Stop'")
    assert "wf.after" not in bench.phases()
    assert bench.phases()["wf.onExit"] == "Succeeded"


def test_terminate_ends_the_pause_of_the_exit_handler_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    stop_when_suspended(bench, "wf.onExit", times=2)
    assert bench.run(workflow(dag(call("pause")), suspend("pause"), suspend("bye", "3h"), onExit="bye")) == "Failed"
    assert bench.last("wf.onExit").message == "Stopped with strategy 'Terminate'"


def test_the_deadline_of_the_workflow_ends_a_pause(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.run(workflow(dag(call("pause")), suspend("pause", "3h"), activeDeadlineSeconds=1)) == "Failed"
    assert bench.last("wf.pause").message == "Step exceeded its deadline"


def test_stop_ends_the_attempts_without_another_one(tmp_path: Path) -> None:
    with ScriptedPlugin(answer) as scripted:
        bench = Bench(tmp_path, scripted, code=tmp_path)
        stop_when_suspended(bench, "wf.fit(0).wake")
        assert bench.run(attempts_workflow(MAKE.format(1), pause="3h")) == "Failed"
    assert bench.phases()["wf.fit(0).wake"] == "Failed"
    assert bench.last("wf.fit").message == "Stopped with strategy 'Stop'"
    assert "wf.fit(1)" not in bench.phases()


def test_a_pause_takes_no_slot_of_a_parallelism(tmp_path: Path) -> None:
    bench = Bench(tmp_path, code=tmp_path)
    bench.reactions.append(lambda change: bench.engine.stop() if change.template == "end" else None)
    tasks = dag(call("pause"), call("good"), call("end", depends="good"), parallelism=1)
    bench.run(workflow(tasks, suspend("pause", "3h"), shell("true", "good"), suspend("end", "3h")))
    assert (bench.phases()["wf.good"], bench.phases()["wf.pause"]) == ("Succeeded", "Failed")
