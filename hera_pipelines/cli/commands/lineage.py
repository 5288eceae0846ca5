"""``tiphys lineage``: where every checkpoint of a run came from."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from tiphys_controller import API_VERSION

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import StoreOption, existing_store
from hera_pipelines.draw import lineage_svg, lineage_tree, lineages_of
from tiphys.errors import NotFoundError, StoreError, UsageError
from tiphys.lineage import LineageTree, tree

EXAMPLES = """\b
Examples:
  tiphys lineage digits-7xk2p
  tiphys lineage digits-7xk2p/fit
  tiphys lineage digits-7xk2p -o svg --output lineage.svg
  tiphys lineage digits-7xk2p -o json | jq '.steps[].attempts[].checkpoints[].status'
"""


class LineageFormat(StrEnum):
    """A lineage can also be a picture; its table is a tree."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    SVG = "svg"


def lineage(
    context: typer.Context,
    where: Annotated[str, typer.Argument(metavar="RUN[/STEP]", help="Name of the run, and of one step of it.")],
    store: StoreOption = None,
    output: Annotated[
        LineageFormat, typer.Option("-o", "--format", help="svg is a self-contained picture.")
    ] = LineageFormat.TABLE,
    output_file: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the picture there, not to stdout.")
    ] = None,
) -> None:
    """Show the checkpoints of a run: which attempt saved them, what each attempt started from, what is corrupt."""
    screen: Screen = context.obj
    if output_file and output is not LineageFormat.SVG:
        raise UsageError("--output is for pictures; add -o svg, or redirect stdout")
    run, _, step = where.partition("/")
    found = _only(tree(existing_store(screen, store), run), step)
    if output is LineageFormat.SVG:
        _picture(screen, found, output_file)
    elif output is LineageFormat.TABLE:
        _tree(screen, found)
    else:
        document = {"apiVersion": API_VERSION, "kind": "Lineage", **found.model_dump(mode="json")}
        screen.document(document, Format(output.value))


def write_picture(found: LineageTree, path: Path) -> None:
    """Write the picture to ``path``; `StoreError` if that cannot be done."""
    try:
        path.write_text(lineage_svg(f"Lineage of {found.run}", lineages_of(found)), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write the picture to {path}: {error.strerror}; name another file") from error


def _only(found: LineageTree, step: str) -> LineageTree:
    """``found`` without the steps that were not asked for; a fanned-out step stands for all of its items."""
    steps = tuple(one for one in found.steps if step in ("", one.step, one.step.partition(".")[0]))
    if step and not steps:
        known = ", ".join(one.step for one in found.steps) or "none"
        raise NotFoundError(f"run {found.run} has no training step {step!r} that keeps checkpoints; it has: {known}")
    return found.model_copy(update={"steps": steps})


def _picture(screen: Screen, found: LineageTree, path: Path | None) -> None:
    if path is None:
        screen.write(lineage_svg(f"Lineage of {found.run}", lineages_of(found)))
    else:
        write_picture(found, path)
        screen.note(f"wrote {path}")


def _tree(screen: Screen, found: LineageTree) -> None:
    for one in lineages_of(found):
        screen.show(lineage_tree(one))
    if not found.steps:
        screen.note(f"run {found.run} has no training step that keeps checkpoints, or none has begun")
