"""``tiphys janitor``: one cleanup round of stores and a cluster, as the controller does every hour."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, NamedTuple

import typer
from rich.text import Text
from tiphys_controller.cleanup import CleanupFinding, WorkflowPresence, find_garbage, find_stalled_runs

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import FormatOption, NamespaceOptions, existing_store, with_option_groups
from tiphys.errors import TiphysError
from tiphys.records import utc_now

EXAMPLES = """\b
Examples:
  tiphys janitor --dry-run
  tiphys janitor s3://ml-runs/tiphys --cluster -n ml
  tiphys janitor s3://ml-runs/tiphys --cluster -n ml --ledger-namespace tiphys --dry-run -o json
"""

_REMOVED, _WOULD_BE_REMOVED, _LEFT_ALONE = "removed", "would be removed", "left"
_STATE_STYLES = {_REMOVED: "red", _WOULD_BE_REMOVED: "yellow"}
_STORAGE_ONLY = WorkflowPresence(None, lambda _: True)


@with_option_groups
def janitor(
    command: typer.Context,
    stores: Annotated[
        list[str] | None,
        typer.Argument(metavar="STORE", help="Stores to clean up. Default: the store of `tiphys runs`."),
    ] = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and change nothing.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check a cluster too: agent pods, leases, deleted Workflows.")
    ] = False,
    options: NamespaceOptions,
    ledger_namespace: Annotated[
        str | None,
        typer.Option(
            "--ledger-namespace", metavar="NAMESPACE", help="Namespace of the Tiphys installation. Default: -n."
        ),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Run one cleanup round, as the controller does every hour.

    Removes uploads that are unfinished after a day, records of alerts that were
    handled a week ago, markers of submissions that are no longer open, and failed
    agent pods of running Workflows. Reports, and does not change, stalled runs and
    orphaned leases; each finding names the command to use.
    """
    screen: Screen = command.obj
    urls: list[str | None] = [*stores] if stores else [None]
    run_stores, now = [existing_store(screen, url) for url in urls], utc_now()
    sources, presence = list[CleanupSource](), _STORAGE_ONLY
    if cluster or options.is_given:
        from tiphys_controller.kubernetes.janitor import NamespaceSnapshot  # needs the Kubernetes client

        snapshot = NamespaceSnapshot(options.connect(command))
        presence = snapshot.build_workflow_presence()
        home = ledger_namespace or snapshot.namespace
        sources.append(partial(snapshot.find_stuck_agent_pods, now))
        sources.append(partial(snapshot.find_orphaned_leases, run_stores, home, now))
    else:
        screen.note("no cluster was checked for agent pods, leases and deleted Workflows; add --cluster to check one")
    for store in run_stores:
        sources += [partial(find_garbage, store, now), partial(find_stalled_runs, store, presence, now)]
    rows, failures = _clean_up(screen, sources, dry_run)
    if output is Format.TABLE:
        _show_cleanup(screen, rows, dry_run)
    else:
        items = [_item_document(*row) for row in rows]
        screen.typed_document("JanitorRound", output, dry_run=dry_run, items=items)
    for failure in failures[:1]:
        raise failure


class _CleanupRow(NamedTuple):
    finding: CleanupFinding
    state: str


CleanupSource = Callable[[], Iterable[CleanupFinding]]
"""Finds the objects of one kind in one store or namespace."""


def _clean_up(
    screen: Screen, sources: Iterable[CleanupSource], dry_run: bool
) -> tuple[list[_CleanupRow], list[TiphysError]]:
    """What the sources find, removed unless this is a dry run. A source that fails does not stop the others."""
    rows, failures = list[_CleanupRow](), list[TiphysError]()
    for source in sources:
        try:
            for finding in source():
                rows.append(_CleanupRow(finding, _remove(finding, dry_run)))
        except TiphysError as error:
            failures.append(error)
            if len(failures) > 1:  # the first failure is reported as the error of the command
                screen.note(str(error))
    return rows, failures


def _remove(finding: CleanupFinding, dry_run: bool) -> str:
    if finding.remove is None:
        return _LEFT_ALONE
    if dry_run:
        return _WOULD_BE_REMOVED
    finding.remove()
    return _REMOVED


def _show_cleanup(screen: Screen, rows: Sequence[_CleanupRow], dry_run: bool) -> None:
    if rows:
        columns = ("WHAT", "WHERE", "NAME", "STATE", "WHY")
        screen.table(columns, [_cleanup_cells(*row) for row in rows], hide=("WHERE",), wraps=True)
    removable = sum(row.state != _LEFT_ALONE for row in rows)
    would = "would be " if dry_run else ""
    left = f", {len(rows) - removable} left for other commands" if len(rows) > removable else ""
    screen.note(f"{removable} of {len(rows)} {would}removed{left}" if rows else "nothing to clean up")


def _cleanup_cells(finding: CleanupFinding, state: str) -> Sequence[str | Text]:
    return (
        finding.kind.value,
        finding.location,
        finding.name,
        Text(state, style=_STATE_STYLES.get(state, "")),
        finding.reason,
    )


def _item_document(finding: CleanupFinding, state: str) -> dict[str, object]:
    return {
        "what": finding.kind.value,
        "where": finding.location,
        "name": finding.name,
        "state": state.replace(" ", "_"),
        "why": finding.reason,
    }
