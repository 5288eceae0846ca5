"""The lineage as a tree in the terminal."""

from rich.text import Text
from rich.tree import Tree

from hera_pipelines.draw.lineage_graph import Dot, Ending, Gap, Lane, Lineage, Shown, collapse
from tiphys.lineage import Status

MOST_STEPS = 24
"""Distinct global steps that are listed one by one before the tree collapses them."""

_FORMS = {
    Status.COMMITTED: ("●", "green"),
    Status.QUARANTINED: ("✗", "bold red"),
    Status.DAMAGED: ("✗", "bold red"),
    Status.LATE: ("○", "yellow"),
    Status.REMOVED: ("◌", "dim"),
}
_ENDING_STYLES = {Ending.DONE: "green", Ending.FAILED: "red", Ending.FENCED: "yellow", Ending.OPEN: "yellow"}


def lineage_tree(lineage: Lineage) -> Tree:
    """Attempts below the step, checkpoints below their attempt."""
    root = Tree(Text(f"{lineage.run}/{lineage.title}", style="bold"), guide_style="dim")
    if lineage.note:
        root.add(Text(lineage.note, style="yellow"))
    for lane, shown in collapse(lineage, MOST_STEPS):
        branch = root.add(_lane(lane))
        for item in shown:
            branch.add(_checkpoint(item))
        if lane.report:
            branch.add(Text(f"⚑ {lane.report}", style="yellow"))
    return root


def _lane(lane: Lane) -> Text:
    text = Text(f"attempt {lane.attempt}, submission {lane.submission}, {lane.start}: ")
    text.append(lane.ending, style=_ENDING_STYLES[lane.ending])
    return text.append(f", {lane.message}" if lane.message else "", style="dim")


def _checkpoint(item: Shown) -> Text:
    if isinstance(item, Gap):
        return Text(f"⋮ {item.count} checkpoints, steps {item.first} to {item.last}", style="dim")
    return _dot(item)


def _dot(dot: Dot) -> Text:
    glyph, style = _FORMS[dot.status]
    text = Text(f"{glyph} step {dot.place.global_step}", style=style)
    if dot.status != Status.COMMITTED:
        text.append(f" {dot.status}")
    return text.append("".join(f"  {fact}" for fact in dot.facts), style="default")
