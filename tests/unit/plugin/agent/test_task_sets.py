"""The decision table of `tiphys_plugin.agent.task_sets`, row by row, and what was observed of Argo beside it."""

from typing import Any

from support.fakes.task_sets import task, task_set
from tiphys_plugin.agent.task_sets import TaskNode, TaskSet, TaskSetState, parse_task_set

DONE = {"phase": "Succeeded", "message": "done"}
QUEUED = {"phase": "Pending", "message": "position 2"}
STOPPED = {"phase": "Failed", "message": "refused"}


class Story:
    """Versions of one task set, one after the other."""

    def __init__(self, tasks: dict[str, Any], **entries: Any) -> None:
        self.version = 0
        first = self._made(tasks, entries)
        self.memory = TaskSetState(first)
        self.seen = self.memory.observe(first, now=0.0)

    def becomes(self, tasks: dict[str, Any], now: float = 1.0, **entries: Any) -> None:
        self.seen = self.memory.observe(self._made(tasks, entries), now)

    def asked(self) -> list[str]:
        return [node.id for node in self.seen.new_nodes]

    def node(self, node_id: str = "n1") -> TaskNode:
        return self.memory.nodes[node_id]

    def answer(self, entry: dict[str, Any], node_id: str = "n1") -> bool:
        return self.memory.record_answer(self.node(node_id), entry)

    def _made(self, tasks: dict[str, Any], entries: dict[str, Any]) -> TaskSet:
        self.version += 1
        found = task_set(tasks, **entries)
        found["metadata"] |= {"resourceVersion": str(self.version), "uid": "set-1"}
        return parse_task_set(found)


def test_a_new_task_is_asked_once_however_often_it_is_rendered() -> None:
    story = Story({"n1": task()})
    assert story.asked() == ["n1"]
    story.becomes({"n1": task(status="Failed")})
    assert story.asked() == []
    assert "status" not in story.node().template["plugin"]["tiphys"]


def test_an_answer_is_written_once() -> None:
    story = Story({"n1": task()})
    assert story.answer(DONE)
    assert story.memory.status_changes() == {"n1": DONE}
    story.becomes({"n1": task()}, n1=DONE)
    assert story.memory.status_changes() == {}
    assert [node.id for node in story.seen.delivered] == ["n1"]
    story.becomes({"n1": task()}, n1=DONE)
    assert story.seen.delivered == []


def test_an_older_version_changes_nothing() -> None:
    story = Story({"n1": task()})
    old = story.memory.task_set
    story.answer(DONE)
    story.becomes({"n1": task()}, n1=DONE)
    story.memory.observe(old, now=2.0)
    assert not story.memory.is_answer_lost(story.node())
    assert story.memory.status_changes() == {}


def test_an_answer_to_a_task_that_is_gone_is_not_written() -> None:
    story = Story({"n1": task()})
    node = story.node()
    story.becomes({})
    assert not story.memory.record_answer(node, DONE)
    assert story.memory.status_changes() == {}


def test_a_task_that_comes_back_is_asked_again() -> None:
    """``argo retry`` issues the exit handler again under the same node id."""
    story = Story({"n1": task(op="finalize")})
    first = story.node()
    story.answer(DONE)
    story.becomes({"n1": task(op="finalize")}, n1=DONE)
    story.becomes({"n1": task(op="finalize")})
    assert story.asked() == []
    story.becomes({})
    story.becomes({"n1": task(op="finalize")})
    assert story.asked() == ["n1"]
    assert not story.memory.record_answer(first, DONE), "what is still asked of the one before is void"


def test_a_final_entry_of_another_writer_stands() -> None:
    story = Story({"n1": task()}, n1=STOPPED)
    assert story.asked() == []
    story = Story({"n1": task()})
    story.answer(QUEUED)
    story.becomes({"n1": task()}, n1=DONE)
    assert not story.answer(QUEUED)
    assert not story.answer(STOPPED)
    assert story.memory.status_changes() == {}


def test_a_final_answer_yields_to_one_that_was_written_first() -> None:
    story = Story({"n1": task()})
    story.answer(STOPPED)
    story.becomes({"n1": task()}, n1=DONE)
    assert story.memory.status_changes() == {}


def test_a_pending_is_written_once_for_each_reason() -> None:
    story = Story({"n1": task()})
    story.answer(QUEUED)
    assert story.memory.status_changes() == {"n1": QUEUED}
    story.becomes({"n1": task()}, n1=QUEUED)
    story.answer(dict(QUEUED))
    assert story.memory.status_changes() == {}
    first = {"phase": "Pending", "message": "position 1"}
    story.answer(first)
    assert story.memory.status_changes() == {"n1": first}


def test_a_pending_of_the_leader_before_is_not_written_again() -> None:
    story = Story({"n1": task()}, n1=QUEUED)
    assert story.asked() == ["n1"]
    story.answer(dict(QUEUED))
    assert story.memory.status_changes() == {}


def test_a_final_answer_replaces_all_of_a_pending() -> None:
    story = Story({"n1": task()}, n1={**QUEUED, "progress": "0/1"})
    story.answer(DONE)
    assert story.memory.status_changes() == {"n1": {**DONE, "progress": None}}


def test_a_pending_is_taken_back_when_it_has_been_seen() -> None:
    story = Story({"n1": task()})
    entry = dict(QUEUED)
    story.answer(entry)
    assert not story.memory.withdraw_pending(story.node(), entry), "it is not stored yet"
    story.becomes({"n1": task()}, n1=QUEUED)
    assert story.memory.withdraw_pending(story.node(), entry)
    assert story.memory.status_changes() == {"n1": None}
    story.becomes({"n1": task()})
    story.answer(dict(QUEUED))
    assert story.memory.status_changes() == {}, "the node has its message still"
    story.answer({"phase": "Pending", "message": "position 1"})
    assert list(story.memory.status_changes()) == ["n1"]


def test_a_pending_that_was_followed_by_another_reason_stays() -> None:
    story = Story({"n1": task()})
    old = dict(QUEUED)
    story.answer(old)
    new = {"phase": "Pending", "message": "position 1"}
    story.answer(new)
    story.becomes({"n1": task()}, n1=new)
    assert story.memory.withdraw_pending(story.node(), old)
    assert story.memory.status_changes() == {}


def test_a_final_answer_is_never_taken_back() -> None:
    story = Story({"n1": task()})
    waiting = dict(QUEUED)
    story.answer(waiting)
    story.becomes({"n1": task()}, n1=QUEUED)
    story.answer(DONE)
    assert story.memory.withdraw_pending(story.node(), waiting)
    assert story.memory.status_changes() == {"n1": DONE}


def test_an_exiting_workflow_gets_its_pendings_back_and_no_new_answers() -> None:
    """A left-over Pending turns a stopped node back to Pending in the finished workflow."""
    story = Story({"n1": task()})
    story.answer(QUEUED)
    story.becomes({"n1": task(), "exit": task("bye", op="finalize")}, n1=QUEUED)
    assert story.asked() == ["exit"]
    assert not story.answer(DONE)
    story.answer(DONE, "exit")
    assert story.memory.status_changes() == {"n1": None, "exit": DONE}


def test_an_answer_on_its_way_does_not_overrule_a_stop() -> None:
    story = Story({"n1": task()})
    story.answer(DONE)
    story.becomes({"n1": task(), "exit": task("bye", op="finalize")})
    assert story.memory.status_changes() == {}


def test_nodes_are_asked_again_when_the_exit_is_over_and_the_workflow_goes_on() -> None:
    story = Story({"n1": task(), "exit": task("bye", op="finalize")})
    assert story.asked() == ["exit"]
    story.becomes({"n1": task()})
    assert story.asked() == ["n1"]


def test_an_entry_without_a_task_is_removed() -> None:
    """One unknown node id blocks the reconcile of the whole workflow."""
    story = Story({"n1": task()}, ghost=QUEUED)
    assert story.memory.status_changes() == {"ghost": None}


def test_an_answer_that_went_while_its_task_stayed_is_noticed_once() -> None:
    story = Story({"n1": task()})
    story.answer(DONE)
    story.becomes({"n1": task()}, n1=DONE)
    story.becomes({"n1": task()}, now=5.0)
    assert [node.id for node in story.seen.lost_answers] == ["n1"]
    story.becomes({"n1": task()}, now=6.0)
    assert story.seen.lost_answers == []
    assert story.memory.is_answer_lost(story.node())
    assert story.memory.status_changes() == {}
    assert story.memory.reopen(story.node())
    assert story.answer(DONE)
    assert story.memory.status_changes() == {"n1": DONE}


def test_an_answer_that_came_back_is_not_lost() -> None:
    story = Story({"n1": task()})
    story.answer(DONE)
    story.becomes({"n1": task()}, n1=DONE)
    story.becomes({"n1": task()})
    story.becomes({"n1": task()}, n1=DONE)
    assert not story.memory.reopen(story.node())


def test_tasks_of_others_are_left_alone() -> None:
    http = {"name": "ping", "http": {"url": "http://example.org"}}
    hello = {"name": "hello", "plugin": {"hello": {}}}
    story = Story({"n1": task(), "n2": http, "n3": hello}, n2=QUEUED)
    assert story.asked() == ["n1"]
    assert story.memory.foreign_templates == [http, hello]
    assert story.memory.status_changes() == {}


def test_a_body_that_is_no_object_is_asked_about_all_the_same() -> None:
    """The core answers it with a sentence."""
    story = Story({"n1": {"name": "prep", "plugin": {"tiphys": "admit"}}})
    assert story.asked() == ["n1"]
    assert story.node().template_workflow_uid == ""
