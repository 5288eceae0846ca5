"""The guarded consoles of a command, apart from `screen`: a command that prints on none does not import Rich."""

from collections.abc import Iterator
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from hera_pipelines.control_characters import replace_control_characters

_PIPE_WIDTH = 10_000
"""Width in columns when the output is a pipe, so that no line is wrapped or cut."""


class GuardedConsole(Console):
    """A console that obeys its own styles and cursor moves, and none in the text that it prints."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        if isinstance(renderable, Text):
            renderable = guarded_text(renderable)  # here, because symbols are wider than what they stand for
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                style = segment.style.update_link(None) if segment.style and segment.style.link else segment.style
                yield Segment(replace_control_characters(segment.text), style)


def guarded_text(text: Text) -> Text:
    """``text`` with visible symbols for its control characters; line breaks stay."""
    guarded = text.copy()
    guarded.plain = replace_control_characters(text.plain)
    return guarded


def open_console(stream: TextIO, *, color: bool) -> Console:
    """A guarded console that writes to ``stream``; without ``color``, also on a terminal."""
    console = GuardedConsole(file=stream, no_color=None if color else True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console
