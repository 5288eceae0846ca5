"""Whole workflows, with real processes and a plugin that answers by script."""

import errno
import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.processes.process import lives
from support.servers.scripted_plugin import TOKEN, ScriptedPlugin, failed, pending, succeeded
from support.stories.local_engine import Bench, call, dag, plugin, shell, steps, workflow
from tiphys_plugin import PodStatus

from hera_pipelines.local import shutdown
from hera_pipelines.local.nodes import NodeChange, NodePhase, pod_name
from hera_pipelines.local.pods import process
from tiphys.errors import ConflictError, StoreError


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, code=tmp_path)


# --- DAG and steps ---


def test_tasks_run_in_the_order_of_their_dependencies(bench: Bench, tmp_path: Path) -> None:
    line = f"echo {{{{inputs.parameters.n}}}} >> {tmp_path}/order"
    tasks = dag(
        call("c", "say", {"n": "c"}, depends="b"),
        call("a", "say", {"n": "a"}),
        call("b", "say", {"n": "b"}, dependencies=["a"]),
    )
    assert bench.run(workflow(tasks, shell(line, "say", "n"))) == "Succeeded"
    assert (tmp_path / "order").read_text().split() == ["a", "b", "c"]


def test_a_task_that_depends_on_a_failed_task_is_omitted_and_the_dag_fails(bench: Bench) -> None:
    tasks = dag(
        call("a", "bad"), call("b", "good", depends="a"), call("c", "good", depends="a.Failed"), call("d", "good")
    )
    assert bench.run(workflow(tasks, shell("exit 1", "bad"), shell("true", "good"))) == "Failed"
    phases = bench.phases()
    assert [phases[f"wf.{task}"] for task in "abcd"] == ["Failed", "Omitted", "Succeeded", "Succeeded"]
    assert bench.last("wf.b").message == "omitted: depends condition not met"


def test_steps_of_a_group_run_together_and_groups_in_turn(bench: Bench, tmp_path: Path) -> None:
    other = f"{tmp_path}/{{{{inputs.parameters.other}}}}"
    meet = f"touch {tmp_path}/{{{{inputs.parameters.me}}}}; while [ ! -e {other} ]; do sleep 0.01; done"
    groups = steps(
        [call("a", "meet", {"me": "1", "other": "2"}), call("b", "meet", {"me": "2", "other": "1"})],
        [call("c", "say", {"x": "{{steps.a.status}}"})],
    )
    manifest = workflow(groups, shell(meet, "meet", "me", "other"), shell("echo {{inputs.parameters.x}}", "say", "x"))
    assert bench.run(manifest) == "Succeeded"
    assert bench.phases()["wf[1].c"] == "Succeeded"
    assert bench.logs("say") == ["Succeeded\n"]


def test_a_failed_step_ends_the_steps(bench: Bench) -> None:
    assert bench.run(workflow(steps([call("a", "bad")], [call("b", "bad")]), shell("exit 1", "bad"))) == "Failed"
    assert "wf[1]" not in bench.phases()
    assert bench.last("wf").message.startswith("child 'wf-")


def test_continue_on_lets_later_steps_see_how_it_ended(bench: Bench) -> None:
    arguments = {"s": "{{steps.a.status}}", "c": "{{=steps['a'].exitCode ?? '-1'}}"}
    groups = steps(
        [call("a", "bad", continueOn={"failed": True})],
        [call("b", "say", arguments)],
    )
    say = shell("echo {{inputs.parameters.s}} {{inputs.parameters.c}}", "say", "s", "c")
    assert bench.run(workflow(groups, shell("exit 9", "bad"), say)) == "Succeeded"
    assert bench.logs("say") == ["Failed 9\n"]


def test_a_plain_exit_code_that_is_missing_is_an_error_instead_of_a_hang(bench: Bench) -> None:
    groups = steps(
        [call("a", "say", {"x": ""}, when="1 == 2")],
        [call("b", "say", {"x": "{{steps.a.exitCode}}"})],
    )
    assert bench.run(workflow(groups, shell("echo {{inputs.parameters.x}}", "say", "x"))) == "Failed"
    assert "on a cluster this workflow would wait for it forever" in bench.last("wf[1]").message


def test_a_false_condition_skips_and_counts_as_success(bench: Bench) -> None:
    tasks = dag(call("a", "good", when="no == yes"), call("b", "good", depends="a"))
    assert bench.run(workflow(tasks, shell("true", "good"))) == "Succeeded"
    assert bench.last("wf.a").message == "when 'no == yes' evaluated false"
    assert bench.phases()["wf.b"] == "Succeeded"


def test_a_skipped_step_offers_its_defaults_and_a_consumer_its_own(bench: Bench) -> None:
    make = shell("echo 1 > /tmp/x; : /tmp/y", "make")
    make["outputs"] = {
        "parameters": [
            {"name": "x", "valueFrom": {"path": "/tmp/x", "default": "producer"}},
            {"name": "y", "valueFrom": {"path": "/tmp/y"}},
        ]
    }
    use = shell("echo {{inputs.parameters.x}} {{inputs.parameters.y}}", "use")
    use["inputs"] = {"parameters": [{"name": "x"}, {"name": "y", "default": "consumer"}]}
    arguments = {name: f"{{{{tasks.make.outputs.parameters.{name}}}}}" for name in "xy"}
    assert (
        bench.run(
            workflow(dag(call("make", when="1 == 2"), call("use", parameters=arguments, depends="make")), make, use)
        )
        == "Succeeded"
    )
    assert bench.logs("use") == ["producer consumer\n"]


def test_templates_within_templates_hand_their_outputs_up(bench: Bench) -> None:
    make = shell("echo v > /tmp/x", "make", outputs={"parameters": [{"name": "x", "valueFrom": {"path": "/tmp/x"}}]})
    inner = steps([call("make")], name="inner")
    inner["outputs"] = {
        "parameters": [{"name": "x", "valueFrom": {"parameter": "{{steps.make.outputs.parameters.x}}"}}]
    }
    outer = dag(call("inner"), name="outer")
    outer["outputs"] = {
        "parameters": [{"name": "x", "valueFrom": {"expression": "tasks.inner.outputs.parameters.x + '!'"}}]
    }
    main = dag(call("outer"), call("use", parameters={"x": "{{tasks.outer.outputs.parameters.x}}"}, depends="outer"))
    assert (
        bench.run(workflow(main, outer, inner, make, shell("echo {{inputs.parameters.x}}", "use", "x"))) == "Succeeded"
    )
    assert bench.logs("use") == ["v!\n"]


def test_workflow_variables_and_defaults_reach_templates(bench: Bench) -> None:
    say = shell(
        "echo {{workflow.name}} {{workflow.parameters.lr}} {{inputs.parameters.d}} {{node.name}} {{pod.name}}", "say"
    )
    say["inputs"] = {"parameters": [{"name": "d", "default": "{{workflow.namespace}}"}]}
    manifest = workflow(dag(call("say")), say, arguments={"parameters": [{"name": "lr", "value": 0.1}]})
    bench.run(manifest)
    [log] = bench.logs("say")
    assert log.split()[:4] == ["wf", "0.1", "default", "wf.say"]
    assert log.split()[4].startswith("wf-say-")


def test_workflow_documents_are_json_in_tags_and_expressions(bench: Bench) -> None:
    say = shell("echo '{{workflow.parameters.json}}' '{{=jsonpath(workflow.parameters.json, '$[0].value')}}'", "say")
    say["inputs"] = {"parameters": [{"name": "labels", "default": "{{workflow.labels.json}}"}]}
    manifest = workflow(dag(call("say")), say, arguments={"parameters": [{"name": "lr", "value": "0.1"}]})
    bench.run(manifest)
    assert bench.logs("say") == ['[{"name":"lr","value":"0.1"}] 0.1\n']


def test_template_defaults_apply_to_every_template(bench: Bench) -> None:
    manifest = workflow(dag(call("bad")), shell("exit 1", "bad"), templateDefaults={"retryStrategy": {"limit": 1}})
    assert bench.run(manifest) == "Failed"
    assert {"wf(0).bad(0)", "wf(0).bad(1)", "wf(1).bad(0)", "wf(1).bad(1)"} <= bench.phases().keys()


# --- retries ---


def test_attempts_know_their_number_and_how_the_last_one_ended(bench: Bench) -> None:
    source = "echo {{retries}} {{lastRetry.exitCode}} {{lastRetry.status}}; [ {{retries}} = 2 ] || exit 75"
    retry = {"limit": 5, "backoff": {"duration": "1s", "factor": 2}}
    assert bench.run(workflow(dag(call("run")), shell(source, "run", retryStrategy=retry))) == "Succeeded"
    assert bench.logs("run") == ["0 0\n", "1 75 Failed\n", "2 75 Failed\n"]
    messages = [change.message for change in bench.changes if change.node == "wf.run" and change.message]
    assert messages == ["Backoff for 1 seconds", "Backoff for 2 seconds"]


def test_an_empty_strategy_retries_failures_without_limit_as_on_argo(bench: Bench) -> None:
    source = "[ {{retries}} = 3 ] || exit 1"
    assert bench.run(workflow(dag(call("run")), shell(source, "run", retryStrategy={}))) == "Succeeded"
    assert "wf.run(3)" in bench.phases()


def test_an_expression_ends_the_retries(bench: Bench) -> None:
    retry = {"limit": 5, "expression": "asInt(lastRetry.exitCode) in [75]"}
    assert bench.run(workflow(dag(call("run")), shell("exit 1", "run", retryStrategy=retry))) == "Failed"
    assert bench.last("wf.run").message == "retryStrategy.expression evaluated to false"
    assert "wf.run(1)" not in bench.phases()


def test_a_composite_is_retried_as_a_whole_and_its_exit_code_is_unknown(bench: Bench) -> None:
    retry = {"limit": 1, "expression": "lastRetry.exitCode == '-1'"}
    inner = steps([call("run", "run", {"n": "{{retries}}"})], name="inner", retryStrategy=retry)
    assert (
        bench.run(workflow(dag(call("inner")), inner, shell("exit 5{{inputs.parameters.n}}", "run", "n"))) == "Failed"
    )
    phases = bench.phases()
    assert phases["wf.inner(0)[0].run"] == phases["wf.inner(1)[0].run"] == "Failed"
    assert bench.last("wf.inner(1)[0].run").message.endswith("(exit code 51)")
    assert bench.last("wf.inner").message == "No more retries left"


# --- fan-out ---


def test_items_run_under_argos_names_and_their_outputs_come_as_lists(bench: Bench) -> None:
    fit = shell("echo {{inputs.parameters.lr}} > /tmp/o; [ {{inputs.parameters.lr}} != 3 ]", "fit", "lr")
    fit["outputs"] = {"parameters": [{"name": "loss", "valueFrom": {"path": "/tmp/o"}}]}
    sweep = call("sweep", "fit", {"lr": "{{item.lr}}"}, withItems=[{"lr": 1}, {"lr": 3}, {"lr": 2}])
    arguments = {"one": "{{tasks.sweep.outputs.parameters.loss}}", "all": "{{tasks.sweep.outputs.parameters}}"}
    best = call("best", "say", arguments, depends="sweep.AnySucceeded")
    say = shell("echo '{{inputs.parameters.one}} {{inputs.parameters.all}}'", "say", "one", "all")
    assert bench.run(workflow(dag(sweep, best), fit, say)) == "Succeeded"
    assert bench.logs("say") == ['["1","2"] [{"loss":"1"},{"loss":"2"}]\n']
    assert bench.phases()["wf.sweep"] == "Failed"
    assert bench.phases()["wf.sweep(1:lr:3)"] == "Failed"


def test_items_of_a_step_are_named_within_its_group(bench: Bench) -> None:
    groups = steps(
        [call("s", "say", {"x": "{{item}}"}, withParam='["a", "b"]')],
        [call("t", "say", {"x": "{{steps.s.outputs.result}}"})],
    )
    assert bench.run(workflow(groups, shell("echo '{{inputs.parameters.x}}'", "say", "x"))) == "Succeeded"
    assert {"wf[0].s(0:a)", "wf[0].s(1:b)"} <= bench.phases().keys()
    assert bench.logs("say") == ['["a","b"]\n', "a\n", "b\n"]


def test_items_and_their_results_reach_programs_with_the_bytes_of_go(bench: Bench) -> None:
    groups = steps(
        [call("s", "say", {"x": "{{item}}"}, withParam='[{"b": 1.0, "a": "<"}]')],
        [call("t", "say", {"x": "{{steps.s.outputs.result}}"})],
    )
    say = shell("printf '%s\\n' '{{inputs.parameters.x}}'", "say", "x")
    assert bench.run(workflow(groups, say)) == "Succeeded"
    item = r'{"a":"\u003c","b":1.0}'
    assert bench.logs("say") == [f"[{item}]\n", f"{item}\n"]


def test_a_condition_may_look_at_the_item(bench: Bench) -> None:
    task = call("s", "say", {"x": "{{item}}"}, withSequence={"count": 3}, when="{{item}} != 1")
    bench.run(workflow(dag(task), shell("echo {{inputs.parameters.x}}", "say", "x")))
    assert bench.logs("say") == ["0\n", "2\n"]
    assert bench.phases()["wf.s(1:1)"] == "Skipped"


def test_no_items_skip_the_task(bench: Bench) -> None:
    task = call("s", "say", {"x": "{{item}}"}, withParam="[]")
    assert bench.run(workflow(dag(task), shell("echo", "say", "x"))) == "Succeeded"
    assert bench.last("wf.s").message == "Skipped, empty params"


def test_items_of_a_skipped_producer_do_not_matter_if_the_condition_is_false(bench: Bench) -> None:
    make = shell("echo [] > /tmp/x", "make", outputs={"parameters": [{"name": "x", "valueFrom": {"path": "/tmp/x"}}]})
    fan = {"withParam": "{{tasks.make.outputs.parameters.x}}", "depends": "make"}
    tasks = dag(
        call("make", when="1 == 2"),
        call("guarded", "say", {"x": "{{item}}"}, when="{{tasks.make.status}} == Succeeded", **fan),
        call("bare", "say", {"x": "{{item}}"}, **fan),
    )
    assert bench.run(workflow(tasks, make, shell("echo", "say", "x"))) == "Error"
    assert bench.phases()["wf.guarded"] == "Skipped"
    assert "its step was skipped" in bench.last("wf.bare").message


# --- parallelism ---


@pytest.mark.parametrize("where", ["workflow", "template"])
def test_parallelism_bounds_the_pods_at_work(bench: Bench, tmp_path: Path, where: str) -> None:
    limit, begun = {"parallelism": 2}, tmp_path / "begun"
    begun.mkdir()
    nap = f"touch {begun}/$$; while [ $(ls {begun} | wc -l) -lt 2 ]; do sleep 0.01; done; sleep 0.05"
    tasks = dag(call("s", "nap", withSequence={"count": 5}), **(limit if where == "template" else {}))
    assert bench.run(workflow(tasks, shell(nap, "nap"), **(limit if where == "workflow" else {}))) == "Succeeded"
    running = peak = 0
    for change in bench.changes:
        if change.kind == "Pod":
            running += (change.phase == "Running") - change.phase.finished
            peak = max(peak, running)
    assert peak == 2


# --- the exit handler ---


@pytest.mark.parametrize(("code", "status"), [(0, "Succeeded"), (1, "Failed")])
def test_the_exit_handler_sees_how_it_ended(bench: Bench, code: int, status: str) -> None:
    handler = plugin("bye", status="{{workflow.status}}", failures="{{workflow.failures}}")
    with ScriptedPlugin() as scripted:
        bench = Bench(bench.state.parent, scripted)
        assert bench.run(workflow(dag(call("run")), shell(f"exit {code}", "run"), handler, onExit="bye")) == status
    [body] = scripted.bodies
    assert body["status"] == status
    failures = json.loads(json.loads(body["failures"]))
    assert {f["displayName"] for f in failures or []} == ({"run", "wf"} if code else set())


def test_a_failed_exit_handler_fails_a_workflow_that_succeeded(bench: Bench) -> None:
    assert (
        bench.run(workflow(dag(call("a", "good")), shell("true", "good"), shell("exit 1", "bad"), onExit="bad"))
        == "Failed"
    )
    assert bench.status()["message"] == "main: Error (exit code 1)"


# --- plugin ---


def run_plugin(tmp_path: Path, answer: Any, **template: Any) -> tuple[Bench, ScriptedPlugin, NodePhase]:
    with ScriptedPlugin(answer) as scripted:
        bench = Bench(tmp_path, scripted)
        ask = {**plugin("ask", "x", inputs=("p",), op="admit", p="{{inputs.parameters.p}}"), **template}
        say = shell("echo {{inputs.parameters.x}}", "say", "x")
        tasks = dag(
            call("ask", parameters={"p": 'a "quoted" text'}),
            call("say", parameters={"x": "{{tasks.ask.outputs.parameters.x}}"}, depends="ask"),
        )
        return bench, scripted, bench.run(workflow(tasks, ask, say))


def test_the_plugin_gets_argos_request_and_its_outputs_are_used(tmp_path: Path) -> None:
    bench, scripted, phase = run_plugin(tmp_path, lambda _: succeeded(x="answer"))
    assert phase == "Succeeded"
    [request] = scripted.calls
    assert scripted.tokens == [f"Bearer {TOKEN}"]
    assert request["workflow"]["metadata"].keys() == {"name", "namespace", "uid"}
    assert request["template"]["plugin"] == {"tiphys": {"op": "admit", "p": 'a "quoted" text'}}
    assert request["template"]["inputs"]["parameters"] == [{"name": "p", "value": 'a "quoted" text'}]
    assert bench.logs("say") == ["answer\n"]


def test_a_pending_answer_is_asked_again_with_its_reason_shown(tmp_path: Path) -> None:
    answers = iter([pending("queue is full", "2s"), pending("still full", "1s"), succeeded(x="1")])
    bench, scripted, phase = run_plugin(tmp_path, lambda _: next(answers))
    assert phase == "Succeeded"
    messages = [change.message for change in bench.changes if change.node == "wf.ask" and change.phase == "Pending"]
    assert messages == ["", "queue is full", "still full"]
    assert len(scripted.calls) == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "no plugin executed the template"),
        (failed("over quota"), "over quota"),
        (500, "500: 500"),
        (404, "404: 404"),
        (b"not json", "the plugin's answer cannot be read"),
        ({"node": {"phase": "Running"}}, "the plugin's answer cannot be read"),
        ({"node": {"phase": "Pending"}}, "answered Pending without requeue"),
        (pending("x", "soon"), "'soon' is not a duration"),
    ],
)
def test_answers_that_fail_the_node(tmp_path: Path, answer: Any, message: str) -> None:
    bench, scripted, phase = run_plugin(tmp_path, lambda _: answer)
    assert (phase, bench.last("wf.ask").phase) == ("Failed", "Failed")
    assert message in bench.last("wf.ask").message
    assert len(scripted.calls) == 1


def test_a_plugin_that_is_busy_is_tried_five_times(tmp_path: Path) -> None:
    answers = iter([503, 503, 503, 503, succeeded(x="1")])
    _, scripted, phase = run_plugin(tmp_path, lambda _: next(answers))
    assert (phase, len(scripted.calls)) == ("Succeeded", 5)


def test_a_plugin_that_stays_busy_fails_the_node(tmp_path: Path) -> None:
    bench, scripted, phase = run_plugin(tmp_path, lambda _: 503)
    assert (phase, len(scripted.calls)) == ("Failed", 5)
    assert bench.last("wf.ask").message == "the plugin did not answer: 503"


def test_a_plugin_that_is_not_there_fails_the_node(bench: Bench) -> None:
    assert bench.run(workflow(dag(call("ask")), plugin("ask", op="admit"))) == "Failed"
    assert bench.last("wf.ask").message.startswith("the plugin did not answer")


def test_a_timeout_ends_the_waiting_for_a_plugin(tmp_path: Path) -> None:
    bench, _, phase = run_plugin(tmp_path, lambda _: pending("for ever", "5s"), timeout="20s")
    assert phase == "Failed"
    assert bench.last("wf.ask").message == "wf.ask exceeded its timeout"


# --- stop, terminate, deadline ---

LONG = "trap 'echo saved; exit 75' TERM; echo ready; while :; do sleep 0.05; done"


def stopping(bench: Bench, node: str, times: int = 1) -> None:
    """Stop the engine once ``node`` waits or runs."""

    def react(change: NodeChange) -> None:
        if change.node == node and change.message == "why not":
            for _ in range(times):
                bench.engine.stop()
        if change.node == node and change.kind == "Pod" and change.phase == "Running":
            threading.Thread(target=when_ready).start()

    def when_ready() -> None:
        while not any("ready" in log for log in bench.logs("")):
            time.sleep(0.01)
        for _ in range(times):
            bench.engine.stop()

    bench.reactions.append(react)


def test_stop_lets_the_program_save_and_runs_the_exit_handler(bench: Bench) -> None:
    stopping(bench, "wf.run")
    manifest = workflow(
        dag(call("run"), call("after", "run", depends="run.Failed")),
        shell(LONG, "run", retryStrategy=None),
        shell("echo {{workflow.status}}", "bye"),
        onExit="bye",
    )
    assert bench.run(manifest) == "Failed"
    assert bench.logs("run")[0].endswith("saved\n")
    assert bench.logs("bye") == ["Failed\n"]
    assert bench.last("wf.run").message == "Stopped with strategy 'Stop'"
    assert "wf.after" not in bench.phases()
    assert bench.status()["message"] == "Stopped with strategy 'Stop'"
    assert bench.cluster.workflow("default", "wf")["spec"]["shutdown"] == "Stop"


def test_stop_ends_the_waiting_for_a_plugin_and_for_a_back_off(tmp_path: Path) -> None:
    with ScriptedPlugin(lambda _: pending("why not", "5m")) as scripted:
        bench = Bench(tmp_path, scripted)
        stopping(bench, "wf.ask")
        retry = {"limit": 9, "backoff": {"duration": "3h"}}
        tasks = dag(call("ask"), call("bad"))
        assert (
            bench.run(workflow(tasks, plugin("ask", op="admit"), shell("exit 1", "bad", retryStrategy=retry)))
            == "Failed"
        )
    assert bench.last("wf.ask").message == "Stopped with strategy 'Stop'"
    assert bench.last("wf.bad").message == "Stopped with strategy 'Stop'"


def test_terminate_runs_no_exit_handler(bench: Bench) -> None:
    stopping(bench, "wf.run", times=2)
    manifest = workflow(dag(call("run")), shell(LONG, "run"), shell("echo bye", "bye"), onExit="bye")
    assert bench.run(manifest) == "Failed"
    assert bench.logs("bye") == []
    assert bench.status()["message"] == "Stopped with strategy 'Terminate'"


@pytest.mark.parametrize(("times", "expected"), [(1, ["stopping"]), (2, ["stopping", "terminating"])])
def test_a_signal_to_the_engine_is_answered_with_the_next_steps(bench: Bench, times: int, expected: list[str]) -> None:
    stopping(bench, "wf.run", times)
    bench.run(workflow(dag(call("run")), shell(LONG, "run")))
    assert [change.message.partition(":")[0] for change in bench.changes if change.kind == "Workflow"] == expected


def test_a_full_disk_does_not_keep_a_person_from_stopping(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bench.cluster.write_workflow

    def write(document: dict[str, Any]) -> None:
        if document["spec"].get("shutdown") and document["status"]["phase"] == "Running":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(document)

    monkeypatch.setattr(bench.cluster, "write_workflow", write)
    stopping(bench, "wf.run")
    assert bench.run(workflow(dag(call("run")), shell(LONG, "run"))) == "Failed"
    assert bench.status()["message"] == "Stopped with strategy 'Stop'"


def test_a_failure_of_the_engine_itself_comes_out_as_it_is(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(pod: PodStatus) -> None:
        raise OSError(errno.ENOSPC, f"no room for {pod.name}")

    monkeypatch.setattr(bench.cluster, "write_pod", write)
    inner = dag(call("run"), call("also", "run"), name="inner")
    with pytest.raises(OSError, match="no room for"):
        bench.run(workflow(dag(call("inner")), inner, shell("true", "run")))


def test_a_second_stop_does_not_wait_for_the_grace_period(bench: Bench) -> None:
    stopping(bench, "wf.run", times=2)
    stubborn = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    patch = '{"terminationGracePeriodSeconds": 600}'
    assert bench.run(workflow(dag(call("run")), shell(stubborn, "run", podSpecPatch=patch))) == "Failed"


STUBBORN_DAEMON = "trap '' TERM HUP; setsid sleep 600 & echo $! $$ ready; while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("stops", "grace"), [pytest.param(2, 600, id="second stop"), pytest.param(1, 0, id="end of the grace period")]
)
def test_daemon_in_a_session_of_its_own_ends_with_the_pod(bench: Bench, stops: int, grace: int) -> None:
    stopping(bench, "wf.run", times=stops)
    patch = f'{{"terminationGracePeriodSeconds": {grace}}}'
    assert bench.run(workflow(dag(call("run")), shell(STUBBORN_DAEMON, "run", podSpecPatch=patch))) == "Failed"
    [log] = bench.logs("run")
    assert not [pid for pid in log.split()[:2] if lives(int(pid))]


def test_init_process_that_does_not_answer_is_killed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_KILL_SECONDS", 0.2)
    stopping(bench, "wf.run", times=2)
    stopped = "kill -STOP $PPID; echo ready; while :; do sleep 0.05; done"
    assert bench.run(workflow(dag(call("run")), shell(stopped, "run"))) == "Failed"


@pytest.mark.parametrize(("answers", "tried"), [(1, "once"), (3, "[23] times")])  # the third is under way
def test_a_stop_waits_for_storage_no_longer_than_for_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int, tried: str
) -> None:
    monkeypatch.setattr(shutdown, "ANSWER_SECONDS", 120.0)

    def out_of_order(_: Any) -> Any:
        if len(scripted.calls) == answers:
            bench.engine.stop()
        return pending(
            "Waiting: cannot write /full/end.json: the disk is full", "2s" if len(scripted.calls) < answers else "1h"
        )

    manifest = workflow(dag(call("run")), shell("true", "run"), plugin("seal", op="finalize"), onExit="seal")
    with ScriptedPlugin(out_of_order) as scripted:
        bench = Bench(tmp_path, scripted)
        with pytest.raises(
            StoreError, match=r"the end of the run is not recorded: cannot write /full/end.json"
        ) as error:
            bench.run(manifest)
    assert re.search(rf"\(tried {tried}\)$", str(error.value))
    notices = [change.message for change in bench.changes if change.kind == "Workflow"]
    assert notices.count("Waiting: cannot write /full/end.json: the disk is full") == 1
    assert bench.status()["phase"] == "Failed"


def test_storage_that_never_answers_does_not_keep_a_person_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "ANSWER_SECONDS", 0.1)
    answer = threading.Event()

    def hang(_: Any) -> Any:
        bench.engine.stop()  # type: ignore[attr-defined]
        answer.wait()
        return succeeded()

    manifest = workflow(dag(call("run")), shell("true", "run"), plugin("seal", op="finalize"), onExit="seal")
    with ScriptedPlugin(hang) as scripted:
        bench = Bench(tmp_path, scripted)
        with pytest.raises(StoreError, match=r"storage did not answer within 0\.1 s"):
            bench.run(manifest)
        answer.set()


def test_messages_of_tiphys_in_a_log_are_shown_while_the_program_runs(bench: Bench, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    bench.reactions.append(lambda change: seen.touch() if "could not be saved" in change.message else None)
    source = f"echo own line; echo 'tiphys: step 3 could not be saved'; while [ ! -e {seen} ]; do sleep 0.05; done"
    assert bench.run(workflow(dag(call("run")), shell(source, "run"))) == "Succeeded"
    shown = [(change.phase, change.message) for change in bench.changes if change.node == "wf.run" and change.message]
    assert shown == [("Running", "step 3 could not be saved")]


@pytest.mark.parametrize("gone", [False, True])
def test_a_disk_that_is_full_or_gone_is_announced_while_programs_run(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    def disk_usage(folder: Path) -> Any:
        if gone and folder == bench.store.folder:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return SimpleNamespace(free=1 << 30 if gone else 4096)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    seen = tmp_path / "seen"
    bench.reactions.append(lambda change: seen.touch() if change.kind == "Workflow" else None)
    wait = shell(f"while [ ! -e {seen} ]; do sleep 0.05; done", "run")
    assert bench.run(workflow(dag(call("run")), wait)) == "Succeeded"
    [notice] = [change.message for change in bench.changes if change.kind == "Workflow"]
    expected = f"{bench.store.folder} cannot be written" if gone else f"the disk of {bench.state} is full"
    assert notice.startswith(expected)


def test_the_workflows_deadline_spares_the_exit_handler(bench: Bench) -> None:
    manifest = workflow(
        dag(call("run")), shell(LONG, "run"), shell("echo bye", "bye"), onExit="bye", activeDeadlineSeconds=1
    )
    assert bench.run(manifest) == "Failed"
    assert bench.last("wf.run").message == "Step exceeded its deadline"
    assert bench.logs("bye") == ["bye\n"]


# --- the Workflow object ---


def test_the_object_is_kept_as_an_api_server_would(bench: Bench) -> None:
    seen: list[Any] = []
    bench.reactions.append(lambda _: seen.append(bench.cluster.workflow("default", "wf")))
    bench.run(workflow(dag(call("a", "good")), shell("true", "good")))
    assert {document["status"]["phase"] for document in seen} == {"Running"}
    final = bench.status()
    assert final["phase"] == "Succeeded"
    assert {node["name"] for node in final["nodes"].values()} == {"wf", "wf.a"}
    assert seen[0]["metadata"]["uid"]


def test_nodes_in_the_object_hold_what_went_in_and_came_out_as_argos_do(bench: Bench) -> None:
    fit = shell("echo {{inputs.parameters.lr}} > /tmp/loss; echo m > /tmp/model; echo done", "fit", "lr")
    fit["outputs"] = {
        "parameters": [{"name": "loss", "valueFrom": {"path": "/tmp/loss"}}],
        "artifacts": [
            {"name": "model", "path": "/tmp/model", "archive": {"none": {}}, "s3": {"key": "m/{{pod.name}}"}}
        ],
    }
    fit["retryStrategy"] = {"limit": 2}
    use = shell("cat /in", "use")
    use["inputs"] = {"artifacts": [{"name": "in", "path": "/in"}]}
    taken = {"artifacts": [{"name": "in", "from": "{{tasks.fit.outputs.artifacts.model}}"}]}
    tasks = dag(call("fit", parameters={"lr": "0.1"}), {"name": "use", "template": "use", "depends": "fit"})
    tasks["dag"]["tasks"][1]["arguments"] = taken
    assert bench.run(workflow(tasks, fit, use)) == "Succeeded"
    nodes = {node["name"]: node for node in bench.status()["nodes"].values()}
    assert (nodes["wf.fit"]["type"], nodes["wf.fit(0)"]["type"]) == ("Retry", "Pod")
    made = nodes["wf.fit(0)"]
    assert made["inputs"]["parameters"] == [{"name": "lr", "value": "0.1"}]
    assert made["outputs"]["parameters"] == [{"name": "loss", "value": "0.1"}]
    assert made["outputs"]["exitCode"] == "0"
    [model] = made["outputs"]["artifacts"]
    assert (model["name"], model["s3"]["key"]) == ("model", f"m/{pod_name('wf', 'wf.fit(0)', 'fit')}")
    [read] = nodes["wf.use"]["inputs"]["artifacts"]
    assert (read["name"], read["s3"]["key"]) == ("in", model["s3"]["key"])


def test_node_of_a_failed_program_holds_its_exit_code_and_its_last_words(bench: Bench) -> None:
    assert bench.run(workflow(dag(call("bad")), shell("echo no rows; exit 3", "bad"))) == "Failed"
    node = next(node for node in bench.status()["nodes"].values() if node["name"] == "wf.bad")
    assert (node["message"], node["terminationMessage"]) == ("main: Error (exit code 3)", "no rows")
    assert node["outputs"]["exitCode"] == "3"


def test_exit_handler_finds_the_ends_of_all_steps_in_the_object(tmp_path: Path) -> None:
    stored: dict[str, str] = {}

    def answer(_: Any) -> dict[str, Any]:
        stored.update({node["name"]: node["phase"] for node in own_bench.status()["nodes"].values()})
        return succeeded()

    with ScriptedPlugin(answer) as scripted:
        own_bench = Bench(tmp_path, scripted, code=tmp_path)
        manifest = workflow(
            dag(call("a", "good"), call("b", "bad", depends="a")),
            shell("true", "good"),
            shell("exit 1", "bad"),
            plugin("bye", op="finalize"),
            onExit="bye",
        )
        assert own_bench.run(manifest) == "Failed"
    assert {name: stored[name] for name in ("wf", "wf.a", "wf.b")} == {
        "wf": "Failed",
        "wf.a": "Succeeded",
        "wf.b": "Failed",
    }


def test_changes_name_the_task_they_belong_to(bench: Bench) -> None:
    inner = steps([call("deep", "good")], name="inner")
    bench.run(workflow(dag(call("outer", "inner")), inner, shell("true", "good")))
    assert {change.node: change.task for change in bench.changes} == {
        "wf": "",
        "wf.outer": "outer",
        "wf.outer[0]": "outer",
        "wf.outer[0].deep": "outer",
    }


def test_a_workflow_runs_on_one_engine_at_a_time(bench: Bench) -> None:
    refused: list[str] = []

    def run_again(change: NodeChange) -> None:
        if change.node == "wf.a" and change.phase == "Running":

            def second() -> None:
                with pytest.raises(ConflictError) as error:
                    Bench(bench.state.parent).run(manifest)
                refused.append(str(error.value))

            thread = threading.Thread(target=second)
            thread.start()
            thread.join()

    bench.reactions.append(run_again)
    manifest = workflow(dag(call("a", "good")), shell("true", "good"))
    assert bench.run(manifest) == "Succeeded"
    assert "another engine runs workflow wf" in refused[0]


def test_an_argument_that_is_missing_is_an_error_of_the_node(bench: Bench) -> None:
    assert bench.run(workflow(dag(call("a", "say")), shell("echo {{inputs.parameters.x}}", "say", "x"))) == "Error"
    assert bench.last("wf.a").message == "inputs.parameters.x was not supplied and has no default"


def test_a_condition_without_an_answer_is_an_error_of_the_node(bench: Bench) -> None:
    task = call("a", "good", when="{{workflow.name}}-1 == wf")
    assert bench.run(workflow(dag(task), shell("true", "good"))) == "Error"
    assert "cannot be evaluated" in bench.last("wf.a").message


def test_a_retry_expression_without_an_answer_gives_up(bench: Bench) -> None:
    retry = {"limit": 3, "expression": "asInt(lastRetry.message) == 1"}
    assert bench.run(workflow(dag(call("bad")), shell("exit 1", "bad", retryStrategy=retry))) == "Failed"
    assert bench.last("wf.bad").message.startswith("retryStrategy: asInt(")


def test_an_output_that_no_step_made_is_an_error_of_the_composite(bench: Bench) -> None:
    inner = steps([call("a", "good", when="1 == 2")], name="inner")
    inner["outputs"] = {"parameters": [{"name": "x", "valueFrom": {"parameter": "{{steps.a.outputs.parameters.x}}"}}]}
    assert bench.run(workflow(dag(call("inner")), inner, shell("true", "good"))) == "Error"
    assert bench.last("wf.inner").message.startswith("output parameter x:")


def test_stopping_an_engine_that_is_idle_does_nothing(bench: Bench) -> None:
    bench.engine.stop()
    bench.engine.delete_pod("none")
    assert bench.run(workflow(dag(call("a")), shell("true", "a"))) == "Succeeded"
