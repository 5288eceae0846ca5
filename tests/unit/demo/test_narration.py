"""The story is numbered, short and free of anything that is not news."""

import io

from rich.console import Console

from hera_pipelines.demo.narration import DemoConsole


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
