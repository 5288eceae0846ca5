"""``tiphys adopt``: finds the steps of Workflows that know nothing of Tiphys, and marks them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import FormatOption
from tiphys.errors import UsageError

if TYPE_CHECKING:
    from hera_pipelines.authoring.adoption import Adoption

EXAMPLES = """\b
Examples:
  tiphys adopt workflow.yaml
  tiphys adopt workflow.yaml --output adopted.yaml
  tiphys compile adopted.yaml --store s3://ml-runs/tiphys | argo submit -
  helm template chart/ | tiphys adopt - --output -
  tiphys adopt workflows/
  tiphys adopt workflow.yaml -o json | jq '.items[].templates[] | select(.becomes == "plain")'
"""
API_VERSION = "tiphys.dev/adoption/v1"


def adopt(
    context: typer.Context,
    files: Annotated[
        list[Path],
        typer.Argument(help="YAML files with Workflows, templates or schedules, folders of these, or - for stdin."),
    ],
    target: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write the file with its marks to this one, or - for stdout."),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Find out what Tiphys can make of Workflows written as YAML.

    Each container that a task of the entry point runs becomes a step, whose result
    is recorded, or a training if it asks for GPUs. The rest stays as it is, and the
    table says why. --output writes the same file with an annotation for each step;
    compile, run, plan, resume and fork take that file in the place of a Python one.
    """
    screen: Screen = context.obj
    paths = list(_expand(files))
    if target is not None and len(paths) != 1:
        raise UsageError("--output is for one file; adopt them one by one")
    adoptions = [adoption for path in paths for adoption in _adopt_file(path, skips_others=len(paths) > 1)]
    is_to_stdout = str(target) == "-"
    if output != Format.TABLE:
        screen.document({"api_version": API_VERSION, "items": list(map(_document, adoptions))}, output)
    elif len(paths) > 1:
        screen.table(("FILE", "WORKFLOW", "BECOMES"), map(_file_row, adoptions), wraps=True)
    elif not is_to_stdout:
        rows = (row for adoption in adoptions for row in _template_rows(adoption))
        screen.table(("LINE", "TEMPLATE", "BECOMES", "WHY"), rows, wraps=True)
    adopted = [adoption for adoption in adoptions if not adoption.refusal]
    if len(paths) > 1:
        screen.note(f"{len(adopted)} of {len(adoptions)} can be adopted")
        return
    for adoption in adoptions:
        if adoption.refusal:
            screen.note(f"{adoption.document.kind} {adoption.document.name} stays as it is: {adoption.refusal}")
    if not adopted:
        raise UsageError(f"{paths[0]}: nothing can be adopted")
    if target is not None:
        _write(screen, adoptions, target)


def _expand(files: Sequence[Path]) -> Iterator[Path]:
    for path in files:
        if not path.is_dir():
            yield path
            continue
        found = sorted(file for suffix in ("yaml", "yml") for file in path.rglob(f"*.{suffix}"))
        if not found:
            raise UsageError(f"{path} has no YAML files")
        yield from found


def _adopt_file(path: Path, *, skips_others: bool) -> "list[Adoption]":
    """The adoptions of a file; with ``skips_others``, none of a file without Workflows."""
    from hera_pipelines.authoring.adoption import propose_adoption, read_argo_documents  # imports Hera: half a second

    try:
        return [propose_adoption(document) for document in read_argo_documents(path)]
    except UsageError:
        if skips_others:
            return []
        raise


def _write(screen: Screen, adoptions: "Sequence[Adoption]", target: Path) -> None:
    from hera_pipelines.authoring.adoption.documents import write_marks

    text = write_marks([adoption.document for adoption in adoptions], [adoption.marks for adoption in adoptions])
    screen.save(target, text, "file", f"; compile it with `tiphys compile {target}`")


def _file_row(adoption: "Adoption") -> tuple[str, str, str]:
    counts = Counter(proposal.kind.value for proposal in adoption.proposals if proposal.tasks)
    what = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items(), reverse=True))
    return (
        str(adoption.document.path),
        adoption.document.name,
        f"stays: {adoption.refusal}" if adoption.refusal else what,
    )


def _template_rows(adoption: "Adoption") -> Iterator[tuple[str, str, str, str]]:
    for proposal in adoption.proposals:
        yield str(proposal.line or "-"), proposal.template, proposal.kind.value, proposal.reason


def _document(adoption: "Adoption") -> dict[str, Any]:
    templates = [
        {
            "template": proposal.template,
            "line": proposal.line,
            "becomes": proposal.kind.value,
            "reason": proposal.reason,
            "tasks": list(proposal.tasks),
        }
        for proposal in adoption.proposals
    ]
    return {
        "file": str(adoption.document.path),
        "kind": adoption.document.kind,
        "name": adoption.document.name,
        "adopted": not adoption.refusal,
        "reason": adoption.refusal,
        "templates": templates,
    }
