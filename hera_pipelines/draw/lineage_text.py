"""Renders the lineage as a tree in the terminal."""

from rich.text import Text
from rich.tree import Tree

from hera_pipelines.draw.lineage_graph import (
    AttemptEnding,
    Dot,
    Gap,
    Lane,
    LaneGroup,
    LaneItem,
    LineageGraph,
    collapse_lineage,
)
from tiphys.lineage.tree import CheckpointStatus

MAX_STEPS = 24
"""Most distinct global steps in a tree that is not collapsed."""
MAX_ROWS = 40
"""Most attempts in a tree; more are folded."""

_STATUS_GLYPHS = {
    CheckpointStatus.COMMITTED: ("●", "green"),
    CheckpointStatus.QUARANTINED: ("✗", "bold red"),
    CheckpointStatus.DAMAGED: ("✗", "bold red"),
    CheckpointStatus.LATE: ("○", "yellow"),
    CheckpointStatus.REMOVED: ("◌", "dim"),
}
_ENDING_STYLES = {
    AttemptEnding.DONE: "green",
    AttemptEnding.FAILED: "red",
    AttemptEnding.FENCED: "yellow",
    AttemptEnding.STOPPED: "yellow",
    AttemptEnding.OPEN: "yellow",
}


def render_lineage_tree(lineage: LineageGraph) -> Tree:
    """Render the attempts of a step, each with its checkpoints."""
    root = Tree(Text(f"{lineage.run}/{lineage.title}", style="bold"), guide_style="dim")
    if lineage.note:
        root.add(Text(lineage.note, style="yellow"))
    data = ""
    for lane, shown in collapse_lineage(lineage, MAX_STEPS, MAX_ROWS):
        branch = root.add(_lane_text(lane))
        if isinstance(lane, Lane) and lane.data != data:
            data = lane.data
            branch.add(Text(f"data: {data or 'none'}", style="dim"))
        for item in shown:
            branch.add(_item_text(item))
        if lane.report:
            branch.add(Text(f"⚑ {lane.report}", style="yellow"))
    return root


def _lane_text(lane: Lane | LaneGroup) -> Text:
    text = Text(f"{lane.title}, {lane.subtitle}, {lane.start}: ")
    text.append(lane.ending_text, style=_ENDING_STYLES[lane.ending])
    return text.append(f", {lane.message}" if lane.message else "", style="dim")


def _item_text(item: LaneItem) -> Text:
    if isinstance(item, Gap):
        return Text(f"⋮ {item.count} checkpoints, steps {item.first} to {item.last}", style="dim")
    return _dot_text(item)


def _dot_text(dot: Dot) -> Text:
    glyph, style = _STATUS_GLYPHS[dot.status]
    text = Text(f"{glyph} step {dot.position.global_step}", style=style)
    if dot.status != CheckpointStatus.COMMITTED:
        text.append(f" {dot.status}")
    return text.append("".join(f"  {fact}" for fact in dot.facts), style="default")
