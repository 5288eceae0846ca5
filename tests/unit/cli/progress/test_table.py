"""Nodes become tasks: what a person sees of each change the engine reports.

| change                               | row                          | told |
|--------------------------------------|------------------------------|------|
| the task's own node                  | its phase and times          | yes  |
| a plugin, pod or retry says something| the message                  | yes  |
| it says the same again, or nothing   | unchanged                    | no   |
| a composite says that a child failed | unchanged                    | no   |
| a composite could not start          | the message                  | yes  |
| a node of a second attempt           | attempt 2, old message gone  | no   |
| the node of another try of a step    | try 2, old message gone      | no   |
| a node above the tasks               | unchanged                    | no   |
"""

from datetime import UTC, datetime, timedelta

import pytest

from hera_pipelines.cli.progress.table import ProgressTable, TimedLines, TrainingSnapshot
from hera_pipelines.local.nodes import NodeChange, NodePhase
from tiphys.protocol.operations import format_submission_end
from tiphys.records import TrainingProgress

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def report(at: int) -> TrainingProgress:
    return TrainingProgress(
        global_step=120,
        total_steps=500,
        steps_per_second=2.0,
        metrics={"loss": 0.25},
        checkpoint_at=NOON + timedelta(seconds=20),
        written_at=NOON + timedelta(seconds=at),
    )


def change(
    node: str,
    phase: NodePhase = NodePhase.RUNNING,
    message: str = "",
    task: str = "fit",
    at: int = 0,
    kind: str = "Plugin",
    log_tail: tuple[str, ...] = (),
) -> NodeChange:
    return NodeChange(NOON + timedelta(seconds=at), node, task, kind, "t", phase, message, log_tail)


def test_a_message_about_the_run_is_printed_and_kept_for_the_live_view() -> None:
    board = ProgressTable(["fit"])
    assert board.apply_change(change("wf", message="stopping: press again", task="", kind="Workflow")) == [
        "stopping: press again"
    ]
    assert board.notice == "stopping: press again"
    assert board.apply_change(change("wf", message="other", task="", kind="DAG")) == []


def test_rows_stand_in_the_order_of_the_pipeline_before_anything_happened() -> None:
    assert list(ProgressTable(["validate", "fit"]).rows) == ["validate", "fit"]


def test_the_tasks_own_node_sets_phase_and_times() -> None:
    board = ProgressTable(["fit"])
    assert board.apply_change(change("wf.fit", kind="Steps")) == ["fit: Running"]
    assert board.apply_change(change("wf.fit", NodePhase.SUCCEEDED, at=7, kind="Steps")) == ["fit: Succeeded"]
    assert board.rows["fit"].seconds(NOON + timedelta(hours=1)) == 7


def test_a_wait_inside_the_task_tells_its_reason_once() -> None:
    board = ProgressTable(["fit"])
    wait = change("wf.fit(0).admit", NodePhase.PENDING, "QueueFull: 8 of 8 A100 are held")
    assert board.apply_change(wait) == ["fit: QueueFull: 8 of 8 A100 are held"]
    assert board.apply_change(wait) == []


def test_a_composite_that_repeats_a_failure_is_not_reported() -> None:
    board = ProgressTable(["fit"])
    failed = change("wf.fit(0)", NodePhase.ERROR, "child 'wf-123' errored", kind="DAG")
    assert board.apply_change(failed) == []
    assert board.rows["fit"].message == ""


@pytest.mark.parametrize(
    ("node", "verdict"),
    [
        ("wf.fit.conclude", "fit failed in attempt 1 by user error"),
        ("wf.fit(0).conclude", "fit failed in attempt 1 by user error"),
        ("wf.fit(1:0.1).conclude", "fit[1] failed in attempt 1 by user error"),
        ("wf.fit(1:0.1)(2).conclude", "fit[1] failed in attempt 3 by user error"),
    ],
)
def test_a_verdict_that_names_its_step_is_not_named_twice(node: str, verdict: str) -> None:
    board = ProgressTable(["fit"])
    assert board.apply_change(change(node, NodePhase.FAILED, verdict)) == [verdict]
    board.apply_change(change("wf.fit", NodePhase.FAILED, kind="Steps"))
    assert board.failure_sentences() == [verdict]


def test_a_message_that_begins_with_a_longer_name_keeps_the_name_of_its_step() -> None:
    board = ProgressTable(["fit"])
    assert board.apply_change(change("wf.fit.conclude", message="fits nowhere")) == ["fit: fits nowhere"]


def test_a_task_that_could_not_start_tells_why() -> None:
    board = ProgressTable(["fit"])
    error = change("wf.fit", NodePhase.ERROR, "{{tasks.prep.outputs.parameters.lr}} has no value", kind="Steps")
    assert board.apply_change(error) == ["fit: {{tasks.prep.outputs.parameters.lr}} has no value", "fit: Error"]
    board.apply_change(change("wf", NodePhase.ERROR, "child 'wf-123' errored", kind="DAG"))
    assert board.failure_sentences() == ["fit: {{tasks.prep.outputs.parameters.lr}} has no value"]


def test_a_second_attempt_leaves_the_words_about_the_first_behind() -> None:
    board = ProgressTable(["fit"])
    again = "Attempt 1 ended by preemption, asked to stop; attempt 2 resumes from step 7"
    printed = [
        board.apply_change(change(f"wf.{node}", phase, message, kind=kind))
        for node, phase, message, kind in (
            ("fit", NodePhase.RUNNING, "", "Retry"),
            ("fit(0)", NodePhase.RUNNING, "", "DAG"),
            ("fit(0).conclude", NodePhase.ERROR, again, "Plugin"),
            ("fit(0)", NodePhase.ERROR, "", "DAG"),
            ("fit", NodePhase.RUNNING, "Backoff for 5 seconds", "Retry"),
        )
    ]
    assert printed == [["fit: Running"], [], [f"fit: {again}"], [], ["fit: Backoff for 5 seconds"]]
    assert board.rows["fit"].message == "Backoff for 5 seconds"
    board.apply_change(change("wf.fit(1)", kind="DAG"))
    assert board.apply_change(change("wf.fit(1).admit")) == []
    row = board.rows["fit"]
    assert (row.attempt, row.message, row.phase, row.tries, row.items) == (2, "", NodePhase.RUNNING, 1, {})


def test_the_tries_of_a_step_without_a_gate_are_neither_items_nor_attempts() -> None:
    board = ProgressTable(["prep"])
    error = "main: Error (exit code 1)"
    printed = [
        board.apply_change(change(f"wf.{node}", phase, message, "prep", kind=kind))
        for node, phase, message, kind in (
            ("prep", NodePhase.RUNNING, "", "Retry"),
            ("prep(0)", NodePhase.RUNNING, "", "Pod"),
            ("prep(0)", NodePhase.FAILED, error, "Pod"),
            ("prep", NodePhase.RUNNING, "Backoff for 5 seconds", "Retry"),
            ("prep(1)", NodePhase.PENDING, "", "Pod"),
        )
    ]
    assert printed == [["prep: Running"], [], [f"prep: {error}"], ["prep: Backoff for 5 seconds"], []]
    row = board.rows["prep"]
    assert (row.message, row.items, row.attempt, row.tries, row.phase) == ("", {}, 1, 2, NodePhase.RUNNING)
    assert board.running_lines(NOON + timedelta(seconds=9)) == ["prep: Running for 9s, try 2"]
    assert board.apply_change(change("wf.prep(1)", NodePhase.FAILED, error, "prep", kind="Pod")) == [f"prep: {error}"]
    last = change("wf.prep", NodePhase.FAILED, "No more retries left", "prep", kind="Retry")
    assert board.apply_change(last) == ["prep: Failed"]
    assert board.failure_sentences() == [f"prep: {error}"]


def test_an_item_runs_until_its_last_try_has_ended() -> None:
    board = ProgressTable(["sweep"])
    for node, phase, kind in (
        ("sweep(0:lr:0.1)", NodePhase.RUNNING, "Retry"),
        ("sweep(0:lr:0.1)(0)", NodePhase.FAILED, "Pod"),
        ("sweep(0:lr:0.1)(1)", NodePhase.RUNNING, "Pod"),
        ("sweep(1:lr:(2))", NodePhase.SUCCEEDED, "Pod"),
    ):
        board.apply_change(change(f"wf.{node}", phase, task="sweep", kind=kind))
    row = board.rows["sweep"]
    assert row.items == {"sweep[0]": NodePhase.RUNNING, "sweep[1]": NodePhase.SUCCEEDED}
    assert (row.items_done, row.items_failed, row.tries) == (1, 0, 1)
    failed = change("wf.sweep(0:lr:0.1)(1)", NodePhase.FAILED, "main: Error", "sweep", kind="Pod")
    assert board.apply_change(failed) == ["sweep[0]: main: Error"]


def test_a_message_of_a_running_task_makes_it_no_item_of_itself() -> None:
    board = ProgressTable(["fit"])
    board.apply_change(change("wf.fit", kind="Pod"))
    board.apply_change(change("wf.fit", message="step 7 is not saved yet", kind="Pod"))
    assert board.rows["fit"].items == {}


def test_nodes_above_the_tasks_belong_to_no_task() -> None:
    board = ProgressTable(["fit"])
    assert board.apply_change(change("wf", message="hello", task="")) == []
    assert board.rows["fit"].phase is None


def test_a_message_of_several_lines_becomes_one() -> None:
    assert ProgressTable(["fit"]).apply_change(change("wf.fit.conclude", message="a\n  b")) == ["fit: a b"]


def test_items_of_a_fan_out_speak_for_themselves_and_are_counted() -> None:
    board = ProgressTable(["sweep"])
    for item in ("sweep(0:lr:0.1)", "sweep(1:lr:0.2)"):
        board.apply_change(change(f"wf.{item}", task="sweep", kind="Steps"))
    said = change("wf.sweep(1:lr:0.2)(1).admit", message="Attempt 2 resumes", task="sweep")
    assert board.apply_change(said) == ["sweep[1]: Attempt 2 resumes"]
    assert board.apply_change(change("wf.sweep(0:lr:0.1)", NodePhase.SUCCEEDED, task="sweep", kind="Steps")) == []
    row = board.rows["sweep"]
    assert (row.items_done, len(row.items), row.attempt) == (1, 2, 2)


def test_items_that_a_stop_ended_are_not_done_and_did_not_fail() -> None:
    board = ProgressTable(["sweep"])
    board.apply_change(change("wf.sweep", task="sweep", kind="Steps"))
    board.apply_change(change("wf.sweep(0:1)", NodePhase.SUCCEEDED, task="sweep", kind="Steps"))
    pod = change("wf.sweep(1:2).run", NodePhase.FAILED, "workflow shutdown with strategy:  Stop", "sweep", kind="Pod")
    assert board.apply_change(pod) == ["sweep[1]: stopped"]
    board.apply_change(change("wf.sweep(1:2)", NodePhase.FAILED, task="sweep", kind="Steps"))
    assert board.apply_change(change("wf.sweep", NodePhase.FAILED, task="sweep", kind="Steps")) == ["sweep: Stopped"]
    assert (board.rows["sweep"].items_done, board.rows["sweep"].items_failed) == (1, 0)


def test_items_that_failed_are_counted_beside_those_that_are_done() -> None:
    board = ProgressTable(["sweep"])
    board.apply_change(change("wf.sweep", task="sweep", kind="Steps"))
    board.apply_change(change("wf.sweep(0:1)", NodePhase.SUCCEEDED, task="sweep", kind="Steps"))
    board.apply_change(change("wf.sweep(1:2)", NodePhase.FAILED, task="sweep", kind="Steps"))
    assert board.running_lines(NOON) == ["sweep: Running for 0s, 1 of 2 items, 1 failed"]


def test_running_items_of_a_fan_out_are_reported_with_their_steps() -> None:
    board = ProgressTable(["sweep"])
    board.apply_change(change("wf.sweep", task="sweep", kind="Steps"))
    for index in range(7):
        phase = NodePhase.SUCCEEDED if index == 0 else NodePhase.RUNNING
        board.apply_change(change(f"wf.sweep({index}:{index})", phase, task="sweep", kind="Steps"))
    assert board.rows["sweep"].followed_items == ["sweep[1]", "sweep[2]", "sweep[3]", "sweep[4]"]
    board.record_training("sweep", TrainingSnapshot(items={"sweep[1]": report(at=1), "sweep[2]": report(at=-5)}))
    assert board.running_lines(NOON) == ["sweep: Running for 0s, 1 of 7 items, sweep[1] step 120 of 500"]


def test_attempts_that_are_dags_belong_to_their_item() -> None:
    board = ProgressTable(["sweep"])
    board.apply_change(change("wf.sweep(0:lr:0.1)", task="sweep", kind="Retry"))
    board.apply_change(change("wf.sweep(0:lr:0.1)(0)", NodePhase.ERROR, task="sweep", kind="DAG"))
    said = change("wf.sweep(0:lr:0.1)(1).admit", message="starts", task="sweep")
    assert board.apply_change(said) == ["sweep[0]: starts"]
    row = board.rows["sweep"]
    assert (row.items, row.items_failed, row.attempt) == ({"sweep[0]": NodePhase.RUNNING}, 0, 2)


@pytest.mark.parametrize("phase", [NodePhase.RUNNING, NodePhase.SUCCEEDED, NodePhase.FAILED])
def test_a_pause_inside_a_task_is_not_shown(phase: NodePhase) -> None:
    board = ProgressTable(["fit"])
    stopped = "Stopped with strategy 'Stop'" if phase is NodePhase.FAILED else ""
    assert board.apply_change(change("wf.fit(0).wake", phase, stopped, kind="Suspend")) == []
    assert board.rows["fit"].message == ""


def test_items_may_show_the_same_text() -> None:
    board = ProgressTable(["sweep"])
    for item in (0, 1):
        said = change(f"wf.sweep({item}:{item})(0).admit", message="starts", task="sweep")
        assert board.apply_change(said) == [f"sweep[{item}]: starts"]


def test_a_retry_that_is_over_repeats_nothing() -> None:
    over = change("wf.fit.run", NodePhase.FAILED, "No more retries left", kind="Retry")
    assert ProgressTable(["fit"]).apply_change(over) == []


def test_a_retry_is_no_item_of_a_fan_out() -> None:
    board = ProgressTable(["fit"])
    board.apply_change(change("wf.fit(1)", kind="DAG"))
    assert board.rows["fit"].items == {}


def test_the_last_words_of_a_failed_container_are_kept() -> None:
    board = ProgressTable(["fit"])
    board.apply_change(change("wf.fit(0).run", NodePhase.FAILED, "exit code 1", log_tail=("out", "of luck")))
    board.apply_change(change("wf.fit.conclude", NodePhase.FAILED, "gave up"))
    assert board.rows["fit"].log_tail == ("out", "of luck")


def test_a_new_checkpoint_is_reported_once() -> None:
    board = ProgressTable(["fit"])
    assert board.record_training("fit", TrainingSnapshot(100)) == ["fit: step 100 is saved"]
    assert board.record_training("fit", TrainingSnapshot(100)) == []
    assert board.record_training("fit", TrainingSnapshot()) == []


def test_a_running_task_is_reported_with_its_progress() -> None:
    board = ProgressTable(["fit", "later"])
    board.apply_change(change("wf.fit", kind="Steps"))
    board.record_training("fit", TrainingSnapshot(100, report(at=30)))
    assert board.running_lines(NOON + timedelta(seconds=34)) == [
        "fit: Running for 34s, step 120 of 500, loss 0.25, 2 steps/s, 3m 6s left, saved 14s ago"
    ]


def test_a_running_task_without_a_report_is_shown_with_items_and_checkpoints() -> None:
    board = ProgressTable(["sweep"])
    board.apply_change(change("wf.sweep", task="sweep", kind="Steps"))
    board.apply_change(change("wf.sweep(0:1)", NodePhase.SUCCEEDED, task="sweep", kind="Steps"))
    board.record_training("sweep", TrainingSnapshot(7))
    assert board.running_lines(NOON) == ["sweep: Running for 0s, 1 of 1 items, step 7 saved"]


def test_the_report_of_an_attempt_before_is_not_that_of_the_next() -> None:
    board = ProgressTable(["fit"])
    board.apply_change(change("wf.fit", kind="Steps", at=10))
    board.record_training("fit", TrainingSnapshot(None, report(at=9)))
    assert board.rows["fit"].training is None  # of an earlier submission
    board.record_training("fit", TrainingSnapshot(None, report(at=20)))
    board.apply_change(change("wf.fit(1).admit", at=30))
    assert board.rows["fit"].training is None
    board.record_training("fit", TrainingSnapshot(None, report(at=20)))
    assert board.rows["fit"].training is None
    board.record_training("fit", TrainingSnapshot(None, report(at=31)))
    assert board.rows["fit"].training is not None


def test_ten_seconds_never_pass_in_silence() -> None:
    now, printed = [NOON], []
    board = ProgressTable(["fit"])
    lines = TimedLines(printed.append, lambda: now[0])
    for seconds in range(60):
        now[0] = NOON + timedelta(seconds=seconds)
        if seconds == 3:
            lines.write(board.apply_change(change("wf.fit", at=3, kind="Steps")))
        lines.break_silence(board)
    assert [line[9:] for line in printed] == [
        "fit: Running",
        *(f"fit: Running for {seconds}s" for seconds in (8, 16, 24, 32, 40, 48, 56)),
    ]


def test_the_sentence_of_finalize_replaces_all_failures() -> None:
    board = ProgressTable(["fit"])
    board.apply_change(change("wf.fit", NodePhase.FAILED, "exit code 1", kind="Pod"))
    ended = format_submission_end("r", 1, "Failed", "fit failed in attempt 1 by user error")
    board.apply_change(change("wf.onExit.finalize", NodePhase.SUCCEEDED, ended, task=""))
    assert board.failure_sentences() == ["fit failed in attempt 1 by user error"]


def test_only_failed_tasks_are_failures() -> None:
    board = ProgressTable(["fit", "eval", "other"])
    board.apply_change(change("wf.fit.conclude", NodePhase.FAILED, "exit code 1"))
    board.apply_change(change("wf.fit", NodePhase.FAILED, kind="Steps"))
    board.apply_change(change("wf.eval", NodePhase.SUCCEEDED, task="eval"))
    board.apply_change(change("wf.other", NodePhase.ERROR, task="other"))
    assert board.failure_sentences() == ["fit: exit code 1", "other: Error"]


def test_the_report_of_a_running_program_stands_below_the_table() -> None:
    table = ProgressTable(["fit"])
    table.apply_change(change("wf.fit(0).run", message="step 7 is not saved yet", kind="Pod"))
    assert table.notice == "fit: step 7 is not saved yet"
    table.apply_change(change("wf.fit(0).run", NodePhase.FAILED, "main: Error", kind="Pod"))
    assert table.notice == "fit: step 7 is not saved yet"
