"""``tiphys lineage``: shows the checkpoints of a run as a tree or a picture."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import RunStepArgument, StoreOption, existing_store, parse_run_step
from hera_pipelines.draw.lineage_graph import build_lineage_graphs
from hera_pipelines.draw.lineage_svg import render_lineage_svg
from hera_pipelines.draw.lineage_text import render_lineage_tree
from tiphys.errors import NotFoundError, UsageError
from tiphys.lineage.step_names import StepNames, selects_step
from tiphys.lineage.tree import LineageTree, read_lineage_tree

EXAMPLES = """\b
Examples:
  tiphys lineage digits-7xk2p
  tiphys lineage digits-7xk2p/fit
  tiphys lineage 'digits-7xk2p/fit[lr=0.1]'
  tiphys lineage digits-7xk2p -o svg --output lineage.svg
  tiphys lineage digits-7xk2p -o json | jq '.steps[].attempts[].checkpoints[].status'
"""


def lineage(
    context: typer.Context,
    where: RunStepArgument,
    store: StoreOption = None,
    output: Annotated[
        Literal["table", "json", "yaml", "svg"],
        typer.Option("-o", "--format", help="Output format; svg is a self-contained picture."),
    ] = "table",
    output_file: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the picture to this file instead of stdout.")
    ] = None,
) -> None:
    """Show the checkpoints of a run and where each came from.

    The tree shows which attempt saved each checkpoint, which checkpoint each
    attempt started from, and which checkpoints are damaged.
    """
    screen: Screen = context.obj
    if output_file and output != "svg":
        raise UsageError("--output is for pictures; add -o svg, or redirect stdout")
    history, step = parse_run_step(existing_store(screen, store), where)
    tree = _select_step(read_lineage_tree(history), step, history.names)
    for damaged in tree.damaged:
        screen.note(f"damaged: {damaged}")
    if output == "svg":
        screen.save(output_file, draw_lineage(tree), "picture")
    elif output == "table":
        _show_tree(screen, tree)
    else:
        screen.typed_document("Lineage", Format(output), **tree.model_dump(mode="json"))


def draw_lineage(tree: LineageTree) -> str:
    """``tree`` as an SVG picture."""
    return render_lineage_svg(f"Lineage of {tree.run}", build_lineage_graphs(tree))


def _select_step(tree: LineageTree, selected: str, names: StepNames) -> LineageTree:
    """Return ``tree`` with the selected step or items only; all steps if ``selected`` is empty."""
    steps = tuple(step for step in tree.steps if selects_step(selected, step.step))
    if selected and not steps:
        existing = ", ".join(step.name for step in tree.steps) or "none"
        raise NotFoundError(
            f"{names.name(selected)} of run {tree.run} has no checkpoints; steps with checkpoints: {existing}"
        )
    return tree.model_copy(update={"steps": steps})


def _show_tree(screen: Screen, tree: LineageTree) -> None:
    for graph in build_lineage_graphs(tree):
        screen.show(render_lineage_tree(graph))
    if not tree.steps:
        screen.note(f"run {tree.run} has no training step that keeps checkpoints, or none has started")
