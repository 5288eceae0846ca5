"""Shows the findings of checks: those of ``tiphys doctor`` and of ``tiphys preflight``."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from rich.text import Text

from hera_pipelines.cli.screen import Format, Screen

if TYPE_CHECKING:
    from tiphys_controller.doctor import Finding

SourceLine = tuple[str, int | None]
"""File of a pipeline, and a line of it; None: not known."""
_STATES = {
    "ok": Text("ok", style="green"),
    "warning": Text("warn", style="yellow"),
    "unknown": Text("?", style="yellow"),
    "failed": Text("FAILED", style="bold red"),
}


def show_findings(
    screen: Screen,
    findings: "Sequence[Finding]",
    output: Format,
    subject: Mapping[str, str],
    find_line: "Callable[[Finding], SourceLine] | None" = None,
) -> None:
    """Print findings, in the order in which a person should read them, as a table or as a document.

    ``subject`` is what was examined, in fields of the document. ``find_line`` returns where the step of a finding is
    written; None without a pipeline.
    """
    from tiphys_controller.doctor import failed_checks  # takes long to import

    if output is not Format.TABLE:
        documents = [_to_document(finding, find_line) for finding in findings]
        screen.typed_document("Findings", output, **subject, ready=not failed_checks(findings), findings=documents)
        return
    rows = [
        (
            _STATES[finding.state.value],
            finding.check,
            format_place(finding, find_line),
            f"{finding.sentence}\n→ {finding.remedy}" if finding.remedy else finding.sentence,
        )
        for finding in findings
    ]
    screen.table(("RESULT", "CHECK", "WHERE", "FINDING"), rows, hide=("WHERE",), wraps=True)


def format_place(finding: "Finding", find_line: "Callable[[Finding], SourceLine] | None" = None) -> str:
    """The place of a finding, with the line of the file if it is known; ``-`` for one about all."""
    if not finding.place:
        return "-"
    file, line = find_line(finding) if find_line else ("", None)
    return finding.place if line is None else f"{finding.place} ({PurePath(file).name}:{line})"


def _to_document(finding: "Finding", find_line: "Callable[[Finding], SourceLine] | None") -> dict[str, object]:
    source = dict(zip(("file", "line"), find_line(finding), strict=True)) if find_line else {}
    return {**finding._asdict(), "state": finding.state.value, **source}
