"""``tiphys gc``: marks checkpoints that no retention rule keeps, and deletes marked ones after a delay."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.progress import track
from rich.text import Text

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import FormatOption, StoreOption, complete_run, existing_store
from tiphys.errors import TiphysError, UsageError
from tiphys.lineage.retention.gc import (
    CollectionReport,
    RetentionAction,
    RetentionDecision,
    UnreachableLineage,
    iter_run_lineages,
)
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.quantities import format_bytes, parse_duration_seconds
from tiphys.protocol.step_spec import RetentionPolicy, parse_keep_best, parse_keep_every
from tiphys.records import utc_now
from tiphys.store import Store, list_runs

EXAMPLES = """\b
Examples:
  tiphys gc digits-7xk2p --dry-run
  tiphys gc digits-7xk2p --keep-last 1 --keep-best loss:min --delay 0s
  tiphys gc --all --store s3://ml-runs/tiphys
  tiphys gc --all -o json | jq '[.lineages[].freed_bytes] | add'
"""

_ACTION_STYLES = {RetentionAction.DELETE: "red", RetentionAction.MARK: "yellow", RetentionAction.WAIT: "yellow"}
_DONE_WORDS = {
    RetentionAction.KEEP: "kept",
    RetentionAction.MARK: "marked",
    RetentionAction.WAIT: "marked",
    RetentionAction.DELETE: "deleted",
}
_DRY_RUN_WORDS = {**_DONE_WORDS, RetentionAction.MARK: "would be marked", RetentionAction.DELETE: "would be deleted"}


@dataclass(frozen=True)
class RetentionOverrides:
    """Retention options of the command line; None keeps the value of the run's own policy."""

    last: int | None
    every_steps: int | None
    best: str | None
    delay_seconds: float | None

    def apply_to(self, policy: RetentionPolicy | None) -> RetentionPolicy | None:
        """Return ``policy`` with these options applied; None keeps all checkpoints.

        Raises:
            UsageError: the run keeps all checkpoints, and the options do not say how many of the newest stay.
        """
        if policy is None and self.last is None:
            if self.every_steps or self.best:
                raise UsageError("the run keeps all its checkpoints; say with --keep-last how many of the newest stay")
            return None
        changes = {
            "last": self.last,
            "every_steps": self.every_steps,
            "best": parse_keep_best(self.best, "--keep-best ") if self.best else None,
            "delay_seconds": self.delay_seconds,
        }
        overrides = {name: value for name, value in changes.items() if value is not None}
        return policy.model_copy(update=overrides) if policy else RetentionPolicy(**{"last": 1, **overrides})


def gc(
    context: typer.Context,
    run: Annotated[str | None, typer.Argument(help="Name of the run.", autocompletion=complete_run)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Clean up all runs of the store.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted, and change nothing.")] = False,
    delay: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time from mark to deletion, such as 10m or 0s.")
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the newest N valid checkpoints.")
    ] = None,
    keep_every: Annotated[
        str | None, typer.Option(metavar="STEPS", help="Keep one checkpoint in each interval, such as '1000 steps'.")
    ] = None,
    keep_best: Annotated[
        str | None, typer.Option(metavar="METRIC", help="Keep the best by a metric, such as loss:min:2.")
    ] = None,
    store: StoreOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Mark and delete checkpoints that no retention rule keeps.

    The rules are the retention policy of each step, changed by the options of this
    call. Pinned and quarantined checkpoints are kept, and so are those that an
    attempt started from. A checkpoint is marked first and deleted after a delay.
    Training programs do the same after each save; this command handles what they
    leave behind, and is safe while they run.
    """
    screen: Screen = context.obj
    if (run is None) is not everything:
        raise UsageError("name one run, or give --all for all runs of the store")
    overrides = RetentionOverrides(
        last=keep_last,
        every_steps=parse_keep_every(keep_every, "--keep-every ") if keep_every else None,
        best=keep_best,
        delay_seconds=None if delay is None else parse_duration_seconds(delay),
    )
    overrides.apply_to(RetentionPolicy(last=1))  # reports an invalid option before the store is read
    run_store = existing_store(screen, store)
    run_names = [run] if run else list(list_runs(run_store))
    reports, failures = _collect_lineages(screen, run_store, run_names, overrides, dry_run)
    if run and failures and not reports:
        raise failures[0]
    if output is Format.TABLE:
        _show_retention(screen, reports, dry_run)
    else:
        lineages = [_lineage_document(report) for report in reports]
        screen.typed_document("Retention", output, store=run_store.url, dry_run=dry_run, lineages=lineages)
    for failure in failures[:1]:
        raise failure


def _collect_lineages(
    screen: Screen, store: Store, runs: list[str], overrides: RetentionOverrides, dry_run: bool
) -> tuple[list[CollectionReport], list[TiphysError]]:
    """Collect each lineage. An unreadable run is reported as a failure and does not stop the others."""
    reports: list[CollectionReport] = []
    failures: list[TiphysError] = []
    for run in _progress(screen, runs):
        try:
            for lineage in iter_run_lineages(RunHistory(store, run), overrides.apply_to):
                if isinstance(lineage, UnreachableLineage):
                    screen.note(
                        f"{lineage.run}/{lineage.label}: its checkpoints cannot be read from here: {lineage.reason}"
                    )
                else:
                    reports.append(lineage.preview() if dry_run else lineage.collect())
        except TiphysError as error:
            failures.append(error)
            if len(runs) > 1:
                screen.note(f"{run}: {error}")
    return reports, failures


def _progress(screen: Screen, runs: list[str]) -> Iterable[str]:
    quiet = screen.quiet or len(runs) < 2 or not screen.err.is_terminal
    return track(runs, "collecting", console=screen.err, transient=True, disable=quiet)


def _show_retention(screen: Screen, reports: list[CollectionReport], dry_run: bool) -> None:
    rows = [(report, decision) for report in reports for decision in report.decisions]
    if rows:
        columns = ("STEP", "CHECKPOINT", "SIZE", "STATE", "WHY")
        screen.table(columns, [_retention_row(*row, dry_run) for row in rows], hide=("SIZE",), wraps=True)
    freed, swept = (sum(getattr(report, name) for report in reports) for name in ("freed_bytes", "orphan_bytes"))
    deleted = sum(decision.action is RetentionAction.DELETE for _, decision in rows)
    would = "would be " if dry_run else ""
    orphans = f", {format_bytes(swept)} of it from interrupted saves" if swept else ""
    screen.note(f"{deleted} of {len(rows)} checkpoints {would}deleted, {format_bytes(freed)} {would}freed{orphans}")


def _retention_row(report: CollectionReport, decision: RetentionDecision, dry_run: bool) -> Sequence[str | Text]:
    words = _DRY_RUN_WORDS if dry_run else _DONE_WORDS
    state = Text(words.get(decision.action, decision.action), style=_ACTION_STYLES.get(decision.action, ""))
    why = ", ".join(decision.reasons) or _deletion_reason(report, decision)
    step = f"{report.lineage.run}/{report.lineage.label}"
    return step, str(decision.checkpoint), format_bytes(decision.size_bytes), state, why


def _deletion_reason(report: CollectionReport, decision: RetentionDecision) -> str:
    due_at = report.find_due_time(decision, utc_now())
    when = f"; may be deleted from {due_at.astimezone():%Y-%m-%d %H:%M:%S} on" if due_at else ""
    return f"no rule keeps it{when}"


def _lineage_document(report: CollectionReport) -> dict[str, object]:
    return {
        "run": report.lineage.run,
        "step": report.lineage.step,
        "name": report.lineage.label,
        "lineage": report.lineage.lineage,
        "store": report.lineage.store.url,
        "keep": report.lineage.keep.model_dump(mode="json") if report.lineage.keep else None,
        "freed_bytes": report.freed_bytes,
        "swept_bytes": report.orphan_bytes,
        "checkpoints": [_checkpoint_document(decision) for decision in report.decisions],
    }


def _checkpoint_document(decision: RetentionDecision) -> dict[str, object]:
    return {
        "checkpoint": str(decision.checkpoint),
        "action": decision.action.value,
        "reasons": list(decision.reasons),
        "marked_at": decision.marked_at.isoformat() if decision.marked_at else None,
        "size_bytes": decision.size_bytes,
    }
