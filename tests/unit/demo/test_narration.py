"""The story is numbered, short and free of anything that is not news."""

import io
from datetime import UTC, datetime, timedelta

from rich.console import Console

from hera_pipelines.demo.narration import DemoConsole, timeline_table
from tiphys.records import Event

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def event(name: str, seconds: float, message: str = "") -> Event:
    return Event(name=name, at=NOON + timedelta(seconds=seconds), message=message or name)


def rows(*events: Event) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=100, no_color=True)
    with console.capture() as capture:
        console.print(timeline_table(events))
    return [line.split() for line in capture.get().splitlines()]


def test_times_are_relative_to_the_first_event() -> None:
    told = rows(event("run.submitted", 0, "begun"), event("attempt.started", 2.54, "[1] tries"))
    assert told == [["0.0", "s", "run.submitted", "begun"], ["2.5", "s", "attempt.started", "[1]", "tries"]]


def test_commits_are_counted_where_they_happened() -> None:
    told = rows(
        event("attempt.started", 0, "a"),
        event("checkpoint.committed", 1),
        event("checkpoint.committed", 2),
        event("attempt.ended", 3, "b"),
        event("attempt.started", 4, "c"),
    )
    assert told[1] == ["2", "checkpoints", "committed"]
    assert len(told) == 4


def test_what_other_events_repeat_is_left_out() -> None:
    assert len(rows(event("attempt.ended", 0), event("step.done", 0), event("checkpoint.quarantined", 1))) == 1


def test_a_run_without_events_has_an_empty_timeline() -> None:
    assert rows() == []


def test_acts_are_numbered_and_timed_by_the_clock_given() -> None:
    seconds = iter([0.0, 1.0, 2.5])
    console = Console(file=io.StringIO(), width=100, no_color=True)
    narrator = DemoConsole(console, clock=lambda: next(seconds))
    with console.capture() as capture:
        narrator.print_action("Submitted.")
        narrator.print_observation("as expected")
        narrator.print_action("Killed [it].")
    assert capture.get() == "\n1  Submitted.  [1.0 s]\n   as expected\n\n2  Killed [it].  [2.5 s]\n"


def test_waiting_says_nothing_where_nobody_watches() -> None:
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as capture, DemoConsole(console).show_status("training…") as show:
        show("training: step 5")
    assert capture.get() == ""
