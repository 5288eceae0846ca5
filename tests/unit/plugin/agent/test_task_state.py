"""What the agent does next, told by a clock that the test moves."""

from typing import Any

import pytest
import structlog
from support.fakes.task_sets import task, task_set
from tiphys_plugin.agent import AgentMetrics, AgentSettings
from tiphys_plugin.agent.patch import PatchOutcome, PatchResult
from tiphys_plugin.agent.plugin_calls import CallResult
from tiphys_plugin.agent.task_sets import TaskSet, parse_task_set
from tiphys_plugin.agent.task_state import AgentState, LostAnswerCheck, PatchJob, PendingCall

SETTINGS = AgentSettings(workers=4, batch_seconds=0.1, max_batch_seconds=1.0, retry_seconds=1.0)
DONE = CallResult({"phase": "Succeeded", "message": "done"}, None)


def waiting(message: str, again_in: float = 5.0) -> CallResult:
    return CallResult({"phase": "Pending", "message": message}, again_in)


class Desk:
    """A board, a clock, and an API server that a test plays itself."""

    def __init__(self, settings: AgentSettings = SETTINGS) -> None:
        self.metrics = AgentMetrics()
        self.board = AgentState(settings, self.metrics)
        self.now = 0.0
        self.version = 0

    def made(self, tasks: dict[str, Any], entries: dict[str, Any], name: str = "flow", uid: str = "set-1") -> TaskSet:
        self.version += 1
        found = task_set(tasks, name, **entries)
        found["metadata"] |= {"resourceVersion": str(self.version), "uid": uid}
        return parse_task_set(found)

    def observe(self, tasks: dict[str, Any], name: str = "flow", uid: str = "set-1", **entries: Any) -> TaskSet:
        found = self.made(tasks, entries, name, uid)
        self.board.observe(found, self.now)
        return found

    def questions(self) -> list[PendingCall]:
        asked = []
        while (question := self.board.next_call(self.now)) is not None:
            asked.append(question)
        return asked

    def question(self) -> PendingCall:
        (question,) = self.questions()
        return question

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.board.tick(self.now)

    def job(self) -> PatchJob | LostAnswerCheck | None:
        return self.board.next_job(self.now)

    def writing(self) -> PatchJob:
        job = self.job()
        assert isinstance(job, PatchJob), job
        return job

    def store(self, job: PatchJob) -> TaskSet:
        """The API server takes the patch."""
        entries = {**job.task_set.entries, **job.changes}
        left = {node: entry for node, entry in entries.items() if entry is not None}
        found = self.made(job.task_set.tasks, left, job.task_set.name)
        self.board.record_patch(job, PatchResult(PatchOutcome.WRITTEN, found), self.now)
        return found


def test_answers_that_come_together_are_one_patch() -> None:
    desk = Desk()
    desk.observe({"n1": task(), "n2": task("fit"), "n3": task("score")})
    for question in desk.questions():
        desk.board.record_answer(question, DONE, desk.now)
    desk.pass_time(SETTINGS.batch_seconds / 2)
    assert desk.job() is None, "n3 waits for a worker"
    desk.pass_time(SETTINGS.batch_seconds / 2)
    assert desk.writing().changes == {"n1": DONE.entry, "n2": DONE.entry}
    assert desk.job() is None


def test_the_last_answer_waits_for_no_other() -> None:
    desk = Desk()
    desk.observe({"n1": task(), "n2": task("fit")})
    first, second = desk.questions()
    desk.board.record_answer(first, DONE, desk.now)
    assert desk.job() is None
    desk.board.record_answer(second, DONE, desk.now)
    assert desk.writing().changes == {"n1": DONE.entry, "n2": DONE.entry}


def test_the_last_answer_waits_for_no_other_even_if_the_task_before_it_went_away() -> None:
    desk = Desk()
    desk.observe({"n1": task(), "n2": task("fit")})
    first, second = desk.questions()
    desk.board.record_answer(first, DONE, desk.now)
    desk.observe({"n1": task()})
    desk.board.record_answer(second, DONE, desk.now)
    assert desk.writing().changes == {"n1": DONE.entry}


def test_a_patch_that_was_sent_early_is_not_sent_again_when_it_was_planned() -> None:
    desk = Desk()
    desk.observe({"n1": task(), "n2": task("fit")})
    for question in desk.questions():
        desk.board.record_answer(question, DONE, desk.now)
    desk.store(desk.writing())
    desk.observe(
        {"n1": task(), "n2": task("fit"), "n3": task("score"), "n4": task("more")}, n1=DONE.entry, n2=DONE.entry
    )
    third, _ = desk.questions()
    desk.pass_time(SETTINGS.batch_seconds / 2)
    desk.board.record_answer(third, DONE, desk.now)
    desk.pass_time(SETTINGS.batch_seconds / 2)
    assert desk.job() is None, "n3 has a time of its own"
    desk.pass_time(SETTINGS.batch_seconds)
    assert list(desk.writing().changes) == ["n3"]


def test_a_reason_to_wait_is_in_no_hurry() -> None:
    desk = Desk()
    desk.observe({"n1": task()})
    desk.board.record_answer(desk.question(), waiting("position 2"), desk.now)
    assert desk.job() is None
    desk.pass_time(SETTINGS.batch_seconds)
    assert desk.writing()


def test_an_answer_during_a_patch_goes_into_the_next_patch() -> None:
    desk = Desk()
    desk.observe({"n1": task(), "n2": task("fit")})
    first, second = desk.questions()
    desk.board.record_answer(first, DONE, desk.now)
    desk.pass_time(0.1)
    job = desk.writing()
    desk.board.record_answer(second, DONE, desk.now)
    desk.pass_time(10)
    assert desk.job() is None
    desk.store(job)
    desk.pass_time(SETTINGS.max_batch_seconds)
    assert list(desk.writing().changes) == ["n2"]


def slowly_patched(desk: Desk) -> list[PendingCall]:
    """A task set whose first patch took 0.2 s; two questions about it are left."""
    desk.observe({"n1": task(), "n2": task("fit"), "n3": task("score")})
    first, *left = desk.questions() + desk.questions()
    desk.board.record_answer(first, DONE, desk.now)
    desk.pass_time(0.1)
    job = desk.writing()
    desk.now += 0.2
    desk.store(job)
    return [*left, *desk.questions()]


def test_a_slow_task_set_is_patched_less_often() -> None:
    desk = Desk()
    second, _ = slowly_patched(desk)
    desk.board.record_answer(second, DONE, desk.now)
    desk.pass_time(0.7)
    assert desk.job() is None
    desk.pass_time(0.1)
    assert desk.writing()


def test_the_last_answer_does_not_wait_because_the_patch_before_was_slow() -> None:
    desk = Desk()
    for question in slowly_patched(desk):
        desk.board.record_answer(question, DONE, desk.now)
    assert len(desk.writing().changes) == 2


def test_answers_that_are_each_the_last_do_not_make_a_patch_each() -> None:
    desk = Desk()
    tasks: dict[str, Any] = {}
    stored: dict[str, Any] = {}
    patches = 0
    for number in range(100):
        tasks[f"n{number}"] = task(f"s{number}")
        desk.observe(tasks, **stored)
        desk.board.record_answer(desk.question(), DONE, desk.now)
        desk.pass_time(SETTINGS.batch_seconds / 10)
        if isinstance(job := desk.job(), PatchJob):
            patches += 1
            stored = desk.store(job).entries
    assert 10 < patches <= 22


def test_a_waiting_node_is_asked_again_when_it_said_so() -> None:
    desk = Desk()
    desk.observe({"n1": task()})
    desk.board.record_answer(desk.question(), waiting("position 2", again_in=5.0), desk.now)
    desk.pass_time(4.9)
    assert desk.questions() == []
    desk.pass_time(0.1)
    assert desk.question().node.id == "n1"


def test_a_node_is_never_asked_twice_at_once() -> None:
    desk = Desk()
    desk.observe({"n1": task()})
    question = desk.question()
    desk.observe({"n1": task(), "exit": task("bye", op="finalize")})
    assert [one.node.id for one in desk.questions()] == ["exit"]
    desk.observe({"n1": task()})
    assert desk.questions() == []
    desk.board.record_answer(question, waiting("late", again_in=1.0), desk.now)
    desk.pass_time(1.0)
    assert desk.question().node.id == "n1"
    desk.pass_time(100.0)
    assert desk.questions() == []


def test_a_small_task_set_need_not_wait_for_a_big_one() -> None:
    desk = Desk()
    desk.observe({f"n{number}": task(f"s{number}") for number in range(10)}, name="big")
    desk.observe({"m1": task()}, name="small", uid="set-2")
    assert [question.task_set.name for question in desk.questions()] == ["small", "big", "big"]


def test_a_pending_is_taken_back_after_a_while() -> None:
    desk = Desk()
    desk.observe({"n1": task()})
    desk.board.record_answer(desk.question(), waiting("position 2", again_in=1000.0), desk.now)
    desk.pass_time(0.1)
    desk.store(desk.writing())
    desk.pass_time(SETTINGS.pending_lifetime_seconds - 0.2)
    assert desk.job() is None
    desk.pass_time(0.2)
    desk.pass_time(SETTINGS.max_batch_seconds)
    assert desk.writing().changes == {"n1": None}


def test_a_pending_answer_that_is_not_stored_yet_is_not_taken_back() -> None:
    desk = Desk()
    desk.observe({"n1": task()})
    desk.board.record_answer(desk.question(), waiting("position 2", again_in=1000.0), desk.now)
    desk.pass_time(0.1)
    job = desk.writing()
    desk.board.record_patch(job, PatchResult(PatchOutcome.UNREACHABLE, error="away"), desk.now)
    desk.pass_time(SETTINGS.pending_lifetime_seconds)
    assert list(desk.writing().changes.values()) == [{"phase": "Pending", "message": "position 2"}]


@pytest.mark.parametrize("outcome", [PatchOutcome.UNREACHABLE, PatchOutcome.NOT_LEADING])
def test_an_answer_that_cannot_be_written_is_kept_and_sent_later(outcome: PatchOutcome) -> None:
    desk = Desk()
    desk.observe({"n1": task()})
    desk.board.record_answer(desk.question(), DONE, desk.now)
    desk.pass_time(0.1)
    for pause in (1.0, 2.0, 4.0):
        desk.board.record_patch(desk.writing(), PatchResult(outcome), desk.now)
        desk.pass_time(pause - 0.1)
        assert desk.job() is None
        desk.pass_time(0.1)
    desk.store(desk.writing())
    assert desk.board.idle


def test_a_conflict_is_decided_again_on_what_is_there_now() -> None:
    desk = Desk()
    desk.observe({"n1": task(), "n2": task("fit")})
    for question in desk.questions():
        desk.board.record_answer(question, DONE, desk.now)
    desk.pass_time(0.1)
    job = desk.writing()
    now = desk.made({"n2": task("fit")}, {})
    desk.board.record_patch(job, PatchResult(PatchOutcome.CONFLICT, now), desk.now)
    desk.pass_time(0.1)
    again = desk.writing()
    assert (again.task_set.version, list(again.changes)) == (now.version, ["n2"])


def test_a_task_set_that_is_gone_is_forgotten() -> None:
    desk = Desk()
    desk.observe({"n1": task(), "n2": task("fit")})
    first, second = desk.questions()
    desk.board.record_answer(first, DONE, desk.now)
    desk.pass_time(0.1)
    desk.board.record_patch(desk.writing(), PatchResult(PatchOutcome.CONFLICT), desk.now)
    assert desk.board.open_tasks == 0
    desk.board.record_answer(second, DONE, desk.now)
    desk.pass_time(100.0)
    assert desk.job() is None
    assert desk.board.idle


def test_a_list_tells_what_is_gone_in_its_namespace_only() -> None:
    desk = Desk()
    desk.observe({"n1": task()})
    desk.board.observe_all("other", [], desk.now)
    assert desk.board.open_tasks == 1
    desk.board.observe_all("ml", [], desk.now)
    assert desk.board.open_tasks == 0
    assert desk.questions() == []


def test_a_task_set_of_the_same_name_is_another_one() -> None:
    desk = Desk()
    desk.observe({"n1": task()})
    old = desk.question()
    desk.observe({"n1": task()}, uid="set-2")
    desk.board.record_answer(old, DONE, desk.now)
    desk.pass_time(1.0)
    assert desk.job() is None
    assert desk.question().node is not old.node


def test_a_body_of_another_workflow_waits_for_the_old_task_set_to_go() -> None:
    desk = Desk()
    desk.observe({"n1": task(uid="uid-of-the-next")})
    assert desk.questions() == []
    desk.pass_time(SETTINGS.stale_task_seconds)
    assert desk.question().node.id == "n1", "then the core says what is wrong with it"


def test_a_patch_that_is_refused_is_tried_in_parts() -> None:
    desk = Desk()
    desk.observe({f"n{number}": task(f"s{number}") for number in range(4)})
    large = CallResult({"phase": "Succeeded", "message": "x" * 1000}, None)
    asked = desk.questions()
    while asked:
        question = asked.pop()
        desk.board.record_answer(question, large if question.node.id == "n0" else DONE, desk.now)
        asked += desk.questions()
    stored: list[str] = []
    desk.pass_time(0.1)
    for _ in range(20):
        if isinstance(job := desk.job(), PatchJob):
            if any(entry and len(entry["message"]) == 1000 for entry in job.changes.values()):
                desk.board.record_patch(
                    job, PatchResult(PatchOutcome.REFUSED, error="etcdserver: request is too large"), desk.now
                )
            else:
                stored += job.changes
                desk.store(job)
        desk.pass_time(SETTINGS.max_batch_seconds)
    assert sorted(stored) == ["n0", "n1", "n2", "n3"]
    assert desk.board.idle


def test_an_answer_that_is_refused_for_itself_fails_its_node_with_a_sentence() -> None:
    desk = Desk()
    desk.observe({"n1": task()})
    desk.board.record_answer(desk.question(), DONE, desk.now)
    desk.pass_time(0.1)
    desk.board.record_patch(desk.writing(), PatchResult(PatchOutcome.REFUSED, error="it is too large"), desk.now)
    desk.pass_time(0.1)
    (entry,) = desk.writing().changes.values()
    assert entry is not None
    assert entry["phase"] == "Failed"
    assert "it is too large" in entry["message"]
    assert "as artifacts" in entry["message"]


def test_a_pending_that_is_refused_for_itself_is_left_unsaid() -> None:
    desk = Desk()
    desk.observe({"n1": task()})
    desk.board.record_answer(desk.question(), waiting("position 2"), desk.now)
    desk.pass_time(0.1)
    desk.board.record_patch(desk.writing(), PatchResult(PatchOutcome.REFUSED, error="it is too large"), desk.now)
    desk.pass_time(1.0)
    assert desk.job() is None
    desk.pass_time(4.0)
    desk.board.record_answer(desk.question(), DONE, desk.now)
    desk.pass_time(1.0)
    assert list(desk.writing().changes.values()) == [DONE.entry]


def test_even_a_refused_sentence_is_tried_again_later() -> None:
    desk = Desk()
    desk.observe({"n1": task()})
    desk.board.record_answer(desk.question(), CallResult({"phase": "Failed", "message": "no"}, None), desk.now)
    desk.pass_time(0.1)
    desk.board.record_patch(desk.writing(), PatchResult(PatchOutcome.REFUSED, error="no room"), desk.now)
    desk.pass_time(0.9)
    assert desk.job() is None
    desk.pass_time(0.1)
    desk.store(desk.writing())
    assert desk.board.idle


def lose_answer(desk: Desk) -> LostAnswerCheck:
    desk.observe({"n1": task()})
    desk.board.record_answer(desk.question(), DONE, desk.now)
    desk.pass_time(0.1)
    desk.store(desk.writing())
    desk.observe({"n1": task()})
    desk.pass_time(SETTINGS.lost_answer_check_seconds - 0.1)
    assert desk.job() is None
    desk.pass_time(0.1)
    job = desk.job()
    assert isinstance(job, LostAnswerCheck)
    return job


def test_a_node_whose_answer_was_lost_is_asked_again_if_its_workflow_waits() -> None:
    desk = Desk()
    desk.board.record_check(lose_answer(desk), True, desk.now)
    assert desk.question().node.id == "n1"


@pytest.mark.parametrize("waits", [False, None])
def test_a_node_whose_answer_was_taken_is_not_asked_again(waits: bool | None) -> None:
    desk = Desk()
    desk.board.record_check(lose_answer(desk), waits, desk.now)
    assert desk.questions() == []
    desk.pass_time(SETTINGS.lost_answer_check_seconds)
    assert isinstance(desk.job(), LostAnswerCheck), "it is looked at again"


def test_a_task_that_went_as_usual_is_not_looked_up() -> None:
    desk = Desk()
    desk.observe({"n1": task()})
    desk.board.record_answer(desk.question(), DONE, desk.now)
    desk.pass_time(0.1)
    desk.store(desk.writing())
    desk.observe({"n1": task()})
    desk.observe({})
    desk.pass_time(SETTINGS.lost_answer_check_seconds * 2)
    assert desk.job() is None


def test_the_log_says_once_for_each_workflow_that_others_have_to_answer() -> None:
    desk = Desk()
    http = {"name": "ping", "http": {"url": "http://example.org"}}
    with structlog.testing.capture_logs() as logs:
        desk.observe({"n1": task(), "n2": http})
        desk.observe({"n1": task(), "n2": http, "n3": {"plugin": {"hello": {}}}})
    (said,) = [log for log in logs if log["event"] == "agent.foreign_tasks"]
    assert said["workflow"] == "flow"
    assert "HTTP templates" in said["hint"]
    assert desk.board.foreign_tasks == 2


def test_closing_makes_no_call_and_writes_at_once() -> None:
    desk = Desk()
    desk.observe({"n1": task(), "n2": task("fit"), "n3": task("register")})
    first, second = desk.questions()
    desk.board.record_answer(first, DONE, desk.now)
    desk.board.closing = True
    assert desk.questions() == []
    desk.board.record_answer(second, DONE, desk.now)
    desk.board.close(desk.now)
    desk.pass_time(0.1)
    assert not desk.board.idle
    job = desk.writing()
    assert sorted(job.changes) == ["n1", "n2"]
    desk.store(job)
    assert desk.board.idle


def test_finished_workflows_cost_nothing() -> None:
    desk = Desk()
    desk.observe({}, name="finished")
    assert desk.board.open_tasks == 0
    assert desk.board.tick(desk.now) is None


def test_metrics_tell_how_long_an_answer_took() -> None:
    desk = Desk()
    desk.observe({"n1": task()})
    desk.board.record_answer(desk.question(), DONE, desk.now)
    desk.pass_time(0.2)
    desk.store(desk.writing())
    text = desk.metrics.render().decode()
    assert "tiphys_agent_answer_seconds_sum 0.2" in text
    assert 'tiphys_agent_patches_total{outcome="written"} 1.0' in text


@pytest.mark.parametrize("earlier_failures", [1, 1024, 100_000])
def test_a_delay_stays_at_its_limit_however_often_a_call_has_failed(earlier_failures: int) -> None:
    settings = AgentSettings(retry_seconds=1.0, max_retry_seconds=2.0)
    assert settings.retry_delay_seconds(earlier_failures) == 2.0
