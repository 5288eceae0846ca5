"""The agent with its threads, against an API server on the loopback device."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import structlog
from support.fakes.task_sets import Controller, ScriptedCore, task
from support.processes.polling import until
from support.servers.kube_server import KubeServer
from tiphys_plugin.agent import AgentMetrics, AgentSettings, SharedAgent
from tiphys_plugin.agent.plugin_calls import ExecuteFunction

from tiphys.errors import StoreError, UsageError
from tiphys.kube import LeaderElector
from tiphys.kube.resources import WORKFLOW_TASK_SETS, WORKFLOWS
from tiphys.protocol.execute_api import ExecuteReply, failed_reply, pending_reply, succeeded_reply

QUICK = AgentSettings(
    workers=4, writers=2, batch_seconds=0.01, max_batch_seconds=0.05, retry_seconds=0.02, max_retry_seconds=0.1
)


@pytest.fixture(autouse=True)
def log() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as entries:
        yield entries


class Running:
    """An agent in this process."""

    def __init__(
        self,
        server: KubeServer,
        core: ScriptedCore,
        namespaces: list[str | None] | None = None,
        settings: AgentSettings = QUICK,
        leads: Callable[[], bool] = lambda: True,
        execute: ExecuteFunction | None = None,
    ) -> None:
        self.metrics = AgentMetrics()
        self.agent = SharedAgent(
            server.api(), execute or core.execute, namespaces or ["ml"], leads, self.metrics, settings
        )
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.agent.run, args=(self.over,))

    def stop(self) -> None:
        self.over.set()
        self.thread.join()

    def __enter__(self) -> "Running":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def holding(core: ScriptedCore, step: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The core's answer to ``step`` is held back: an event says that it was asked, another lets it answer."""
    asked, go_on = threading.Event(), threading.Event()

    def before(called: str) -> None:
        if called == step:
            asked.set()
            assert go_on.wait(60)

    core.before = before
    try:
        yield asked, go_on
    finally:
        go_on.set()


def test_open_tasks_are_answered_whether_they_were_there_or_come(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"n1": task()})
    core = ScriptedCore()
    with Running(server, core):
        until(lambda: controller.messages() == {"n1": "Succeeded prep done"})
        controller.add({"n2": task("fit")})
        until(lambda: "n2" in controller.messages())
    assert core.calls == [("flow", "prep"), ("flow", "fit")]


def test_a_request_is_what_argos_own_agent_sends(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"n1": task()})
    core = ScriptedCore()
    with Running(server, core):
        until(lambda: core.requests)
    metadata = {"name": "flow", "namespace": "ml", "uid": "uid-1"}
    assert core.requests == [{"workflow": {"metadata": metadata}, "template": task()}]


def test_a_waiting_node_shows_its_reason_and_is_asked_until_it_is_decided(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"n1": task()})
    core = ScriptedCore(
        prep=[pending_reply("position 2", 0.01)] * 5 + [pending_reply("position 1", 0.01), failed_reply("no")]
    )
    with Running(server, core):
        until(lambda: controller.messages() == {"n1": "Failed no"})
    assert len(core.calls) == 7


def test_a_pending_answer_is_written_once_for_each_reason(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"n1": task()})
    core = ScriptedCore(prep=[pending_reply("position 2", 0.001)])
    never = AgentSettings(
        batch_seconds=0, pending_lifetime_seconds=3600, lost_answer_check_seconds=3600
    )  # however slow the machine is
    with Running(server, core, settings=never):
        until(lambda: server.count("patch", "workflowtasksets") and len(core.calls) > 20)
        assert server.count("patch", "workflowtasksets") == 1


def test_answers_of_many_nodes_share_few_patches(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({f"n{number}": task(f"s{number}") for number in range(100)})
    with Running(server, ScriptedCore(), settings=AgentSettings(batch_seconds=0.2)):
        until(lambda: len(controller.entries()) == 100)
        assert server.count("patch", "workflowtasksets") < 30


def test_after_argo_retry_the_exit_handler_is_answered_again(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"exit": task("bye", op="finalize")})
    core = ScriptedCore()
    with Running(server, core):
        for round_ in (1, 2):
            until(lambda: controller.messages() == {"exit": "Succeeded bye done"})
            assert len(core.calls) == round_
            controller.remove("exit")
            until(lambda: not controller.entries())
            controller.add({"exit": task("bye", op="finalize")}, labels={"workflows.argoproj.io/completed": "true"})
        until(lambda: controller.messages() == {"exit": "Succeeded bye done"})
    assert len(core.calls) == 3


def test_a_task_set_that_says_completed_is_answered(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({})
    core = ScriptedCore(fit=[failed_reply("use `tiphys resume digits`")])
    with Running(server, core):
        controller.add({"n1": task("fit", op="conclude")}, labels={"workflows.argoproj.io/completed": "true"})
        until(lambda: controller.messages() == {"n1": "Failed use `tiphys resume digits`"})


def test_an_answer_to_a_node_that_argo_has_taken_back_is_never_written(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"n1": task(), "n2": task("fit")})
    core = ScriptedCore()
    with Running(server, core), holding(core, "prep") as (asked, go_on):
        assert asked.wait(60)
        until(lambda: "n2" in controller.entries())
        controller.remove("n1")
        go_on.set()
        controller.add({"n3": task("register")})
        until(lambda: "n3" in controller.entries())
        assert "n1" not in controller.entries()


def test_a_stopped_workflow_keeps_no_pending(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"n1": task()})
    core = ScriptedCore(prep=[pending_reply("position 2", 0.01)])
    with Running(server, core):
        until(lambda: controller.messages() == {"n1": "Pending position 2"})
        controller.add({"exit": task("bye", op="finalize")})
        until(lambda: controller.messages() == {"exit": "Succeeded bye done"})


def test_left_over_entries_are_removed(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"n1": task()})
    ghost = {"status": {"nodes": {"ghost": {"phase": "Pending", "message": "boo"}}}}
    controller.api.patch(WORKFLOW_TASK_SETS, "ml", "flow", ghost, subresource="status")
    with Running(server, ScriptedCore()):
        until(lambda: controller.messages() == {"n1": "Succeeded prep done"})


def test_an_answer_that_argo_lost_is_given_again(server: KubeServer) -> None:
    """It died after it had removed the answer, and before it stored the workflow."""
    controller = Controller(server.api())
    workflow = {"metadata": {"name": "flow"}, "status": {"nodes": {"n1": {"phase": "Pending"}}}}
    controller.api.create(WORKFLOWS, "ml", workflow)
    controller.create({"n1": task()})
    core = ScriptedCore()
    with Running(server, core, settings=AgentSettings(workers=2, batch_seconds=0.01, lost_answer_check_seconds=0.05)):
        until(lambda: "n1" in controller.entries())
        controller.remove_answers("n1")
        until(lambda: "n1" in controller.entries())
    assert len(core.calls) == 2


def test_other_plugins_and_http_templates_are_left_alone(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"n1": {"http": {"url": "http://x"}}, "n2": {"plugin": {"hello": {}}}, "n3": task()})
    with Running(server, ScriptedCore()) as running:
        until(lambda: controller.messages() == {"n3": "Succeeded prep done"})
        assert b"tiphys_agent_foreign_tasks 2.0" in running.metrics.render()


@pytest.mark.parametrize("status", [409, 503, 500, 0])
def test_a_failed_patch_is_sent_again(server: KubeServer, status: int) -> None:
    controller = Controller(server.api())
    server.fail_next(status, times=2, verb="patch", plural="workflowtasksets")
    controller.create({"n1": task()})
    core = ScriptedCore()
    with Running(server, core):
        until(lambda: controller.messages() == {"n1": "Succeeded prep done"})
    assert len(core.calls) == 1


def test_a_patch_whose_answer_was_lost_does_no_harm(server: KubeServer) -> None:
    controller = Controller(server.api())
    server.fail_next(0, verb="patch", plural="workflowtasksets", done=True)
    controller.create({"n1": task()})
    with Running(server, ScriptedCore()) as running:
        until(lambda: b"tiphys_agent_answer_seconds_count 1.0" in running.metrics.render())
        assert controller.messages() == {"n1": "Succeeded prep done"}


def test_answers_outlast_an_api_server_that_is_away(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"n1": task()})
    core = ScriptedCore()
    with Running(server, core), holding(core, "prep") as (asked, go_on):
        assert asked.wait(60)
        server.pause()
        go_on.set()
        until(lambda: server.count("patch") > 1)
        server.resume()
        until(lambda: controller.messages() == {"n1": "Succeeded prep done"})
    assert len(core.calls) == 1


def test_a_watch_that_lost_the_thread_misses_nothing(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"n1": task()})
    with Running(server, ScriptedCore()):
        until(lambda: "n1" in controller.entries())
        server.drop_watches()
        controller.add({"n2": task("fit")})
        server.compact()
        until(lambda: "n2" in controller.entries())


def test_storage_away_is_said_and_waited_for(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"n1": task()})
    away = StoreError("s3://ml-runs does not answer")
    core = ScriptedCore(prep=[away])
    with Running(server, core):
        until(
            lambda: controller.messages() == {"n1": "Pending Waiting, for 30 min at most: s3://ml-runs does not answer"}
        )
        core.scripts["prep"] = [succeeded_reply("back")]
        until(lambda: controller.messages() == {"n1": "Succeeded back"})


def test_storage_away_beyond_the_limit_fails_the_node_with_the_reason(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"n1": task()})
    core = ScriptedCore(prep=[StoreError("s3://ml-runs does not answer")])
    with Running(server, core, settings=replace(QUICK, outage_limit_seconds=0.3)):
        until(lambda: controller.entries().get("n1", {}).get("phase") == "Failed", 120)
    message = controller.messages()["n1"]
    assert message.startswith("Failed No answer for 0.005 min: s3://ml-runs does not answer. ")
    assert message.endswith("`tiphys resume flow`")


def test_a_bug_of_one_call_ends_neither_the_agent_nor_the_node(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"n1": task(), "n2": task("fit")})
    core = ScriptedCore(prep=[KeyError("oops")])
    with Running(server, core):
        until(lambda: set(controller.entries()) == {"n1", "n2"})
        assert controller.messages()["n2"] == "Succeeded fit done"
        assert "(KeyError)" in controller.messages()["n1"]
        assert "oops" not in controller.messages()["n1"]


def test_a_namespace_that_nothing_serves_waits_with_the_reason(server: KubeServer) -> None:
    def execute(namespace: str, _: object) -> ExecuteReply:
        raise UsageError(f"namespace {namespace} has no store")

    controller = Controller(server.api())
    controller.create({"n1": task()})
    with Running(server, ScriptedCore(), execute=execute):
        until(lambda: "namespace ml has no store" in controller.messages().get("n1", ""))
        assert controller.entries()["n1"]["phase"] == "Pending"


def test_a_single_watch_serves_all_namespaces(server: KubeServer) -> None:
    cores = {"ml": ScriptedCore(), "vision": ScriptedCore()}
    controllers = [Controller(server.api(name), name) for name in cores]
    for controller in controllers:
        controller.create({"n1": task()})
    with Running(
        server,
        ScriptedCore(),
        namespaces=[None],
        execute=lambda namespace, document: cores[namespace].execute(namespace, document),
    ):
        for controller in controllers:
            until(lambda one=controller: "n1" in one.entries())  # type: ignore[misc]
        until(lambda: server.count("watch") > 0)  # what the first listing shows is answered before
        assert server.count("watch") == 1
    assert [core.requests[0]["workflow"]["metadata"]["namespace"] for core in cores.values()] == list(cores)


def test_a_namespace_of_others_is_not_touched(server: KubeServer) -> None:
    ours, theirs = Controller(server.api()), Controller(server.api("theirs"), "theirs")
    theirs.create({"n1": task()})
    ours.create({"n1": task()})
    with Running(server, ScriptedCore(), namespaces=["ml", "vision"]):
        until(lambda: "n1" in ours.entries())
    assert theirs.entries() == {}


def test_the_watch_error_names_the_namespace_that_cannot_be_seen(server: KubeServer) -> None:
    server.authorize = lambda request: request.namespace != "vision"
    server.add_namespace("vision")
    controller = Controller(server.api())
    controller.create({"n1": task()})
    with Running(server, ScriptedCore(), namespaces=["ml", "vision"]) as running:
        until(lambda: "n1" in controller.entries())
        until(lambda: "namespace vision" in running.agent.watch_error)
        assert "namespace ml" not in running.agent.watch_error
        server.authorize = lambda _: True
        until(lambda: not running.agent.watch_error)


def test_a_cluster_without_argo_is_said_and_waited_for(server: KubeServer) -> None:
    server.unknown.add("workflowtasksets")
    with Running(server, ScriptedCore()) as running:
        until(lambda: "cannot be watched" in running.agent.watch_error)
        server.unknown.clear()
        controller = Controller(server.api())
        controller.create({"n1": task()})
        until(lambda: "n1" in controller.entries())


def test_a_slow_workflow_does_not_hold_up_another(server: KubeServer) -> None:
    controller = Controller(server.api())
    core = ScriptedCore()
    with Running(server, core), holding(core, "slow") as (asked, _):
        controller.create({f"n{number}": task("slow") for number in range(20)}, name="slow-flow")
        assert asked.wait(60)
        controller.create({"n1": task()}, name="quick-flow")
        until(lambda: "n1" in controller.entries("quick-flow"))
        assert controller.entries("slow-flow") == {}


def test_calls_under_way_are_finished_and_written_before_it_ends(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"n1": task()})
    core = ScriptedCore()
    running = Running(server, core)
    with running, holding(core, "prep") as (asked, go_on):
        assert asked.wait(60)
        running.over.set()
        go_on.set()
        running.thread.join(60)
        assert not running.thread.is_alive()
    assert controller.messages() == {"n1": "Succeeded prep done"}


def test_a_new_agent_builds_everything_from_the_task_sets(server: KubeServer) -> None:
    controller = Controller(server.api())
    controller.create({"n1": task(), "n2": task("fit")})
    with Running(server, ScriptedCore(fit=[pending_reply("position 2", 0.01)])):
        until(lambda: len(controller.entries()) == 2)
    patches = server.count("patch")
    second = ScriptedCore(fit=[pending_reply("position 2", 0.01)])
    with Running(server, second):
        until(lambda: len(second.calls) > 5)
        assert server.count("patch") == patches, "the same reason is not written again"
        second.scripts["fit"] = [succeeded_reply("ran")]
        until(lambda: controller.messages() == {"n1": "Succeeded prep done", "n2": "Succeeded ran"})
    assert ("flow", "prep") not in second.calls


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def candidate(server: KubeServer, name: str, clock: Clock) -> LeaderElector:
    return LeaderElector(server.api(), "ml", "tiphys-agent", name, monotonic=clock)


def test_a_paused_old_leader_writes_no_stale_pending_over_a_newer_answer(server: KubeServer) -> None:
    """The old leader decides on a Pending, is paused right before its patch leaves, and wakes when all is over."""
    old_clock, new_clock = Clock(), Clock()
    old_lease, new_lease = candidate(server, "old", old_clock), candidate(server, "new", new_clock)
    assert old_lease.try_acquire_or_renew()
    assert not new_lease.try_acquire_or_renew()
    asks_to_write, wakes = threading.Event(), threading.Event()

    def old_leads() -> bool:
        held = old_lease.is_leader  # it was true when the process was paused
        asks_to_write.set()
        assert wakes.wait(60)
        return held

    controller = Controller(server.api())
    controller.create({"n1": task()})
    old = Running(server, ScriptedCore(prep=[pending_reply("position 2", 1000)]), leads=old_leads)
    with old:
        assert asks_to_write.wait(60)
        new_clock.now += 60.0
        assert new_lease.try_acquire_or_renew()
        with Running(server, ScriptedCore(prep=[succeeded_reply("ran")]), leads=lambda: new_lease.is_leader):
            until(lambda: controller.messages() == {"n1": "Succeeded ran"})
        refused = server.count("patch")
        old_clock.now += 60.0
        wakes.set()
        until(lambda: server.count("patch") > refused)
        until(lambda: b'outcome="conflict"} 1.0' in old.metrics.render())
        assert controller.messages() == {"n1": "Succeeded ran"}
        controller.remove("n1")
        controller.add({"n2": task("fit")})
        until(lambda: b'outcome="not_leading"}' in old.metrics.render())
    assert controller.entries() == {}


def test_a_leader_that_lost_its_lease_writes_nothing(server: KubeServer) -> None:
    leads = threading.Event()
    controller = Controller(server.api())
    controller.create({"n1": task()})
    with Running(server, ScriptedCore(), leads=leads.is_set) as running:
        until(lambda: b'outcome="not_leading"}' in running.metrics.render())
        assert server.count("patch") == 0
        leads.set()
        until(lambda: "n1" in controller.entries())


def test_a_crash_of_a_thread_ends_the_term(server: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next term begins anew; going on deaf would leave every node Pending."""

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("tiphys_plugin.agent.agent.AgentState.observe_all", broken)
    Controller(server.api()).create({"n1": task()})
    running = Running(server, ScriptedCore())
    running.thread.start()
    running.thread.join(60)
    assert not running.thread.is_alive()
