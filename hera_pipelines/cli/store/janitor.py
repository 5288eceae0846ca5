"""``tiphys janitor``: one cleanup round of stores and a cluster, as the controller does every hour."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.text import Text
from tiphys_controller import API_VERSION
from tiphys_controller.cleanup import CleanupFinding, WorkflowPresence, find_garbage, find_stalled_runs

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    ClusterOptions,
    FormatOption,
    NamespaceOptions,
    existing_store,
    with_option_groups,
)
from tiphys.errors import TiphysError
from tiphys.records import utc_now
from tiphys.store import Store

if TYPE_CHECKING:
    from tiphys_controller.kubernetes.janitor import NamespaceSnapshot


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
    run_stores = [existing_store(screen, url) for url in urls]
    cleanup = _CleanupRound(dry_run)
    snapshot = None
    if cluster or options.is_given:
        snapshot = _observe_cluster(command, options)
    else:
        screen.note("no cluster was checked for agent pods, leases and deleted Workflows; add --cluster to check one")
    sources = [
        *_cluster_sources(snapshot, run_stores, ledger_namespace),
        *_store_sources(run_stores, snapshot.build_workflow_presence() if snapshot else None),
    ]
    for source in sources:
        cleanup.examine(source, screen)
    if output is Format.TABLE:
        _show_cleanup(screen, cleanup.rows, dry_run)
    else:
        screen.document(_cleanup_document(cleanup.rows, dry_run), output)
    for failure in cleanup.failures[:1]:
        raise failure


class _CleanupRow(NamedTuple):
    finding: CleanupFinding
    state: str


CleanupSource = Callable[[], Iterable[CleanupFinding]]
"""Finds the objects of one kind in one store or namespace."""


@dataclass
class _CleanupRound:
    """Findings of one round and their states. A failing source does not stop the others."""

    dry_run: bool
    rows: list[_CleanupRow] = field(default_factory=list)
    failures: list[TiphysError] = field(default_factory=list)

    def examine(self, source: CleanupSource, screen: Screen) -> None:
        """Add the findings of one source, and remove them unless this is a dry run."""
        try:
            for finding in source():
                self.rows.append(_CleanupRow(finding, self._remove(finding)))
        except TiphysError as error:
            self.failures.append(error)
            if len(self.failures) > 1:  # the first failure is reported as the error of the command
                screen.note(str(error))

    def _remove(self, finding: CleanupFinding) -> str:
        if finding.remove is None:
            return _LEFT_ALONE
        if self.dry_run:
            return _WOULD_BE_REMOVED
        finding.remove()
        return _REMOVED


def _observe_cluster(command: typer.Context, options: ClusterOptions) -> "NamespaceSnapshot":
    from tiphys_controller.kubernetes.janitor import (
        NamespaceSnapshot,  # only a command that talks to a cluster needs it
    )

    api = options.connect()
    command.call_on_close(api.close)
    return NamespaceSnapshot(api)


def _cluster_sources(
    snapshot: "NamespaceSnapshot | None", stores: Sequence[Store], ledger_namespace: str | None
) -> Iterator[CleanupSource]:
    if snapshot is not None:
        yield lambda: snapshot.find_stuck_agent_pods(utc_now())
        yield lambda: snapshot.find_orphaned_leases(stores, ledger_namespace or snapshot.namespace, utc_now())


def _store_sources(stores: Sequence[Store], workflows: WorkflowPresence | None) -> Iterator[CleanupSource]:
    for store in stores:
        yield lambda store=store: find_garbage(store, utc_now())  # type: ignore[misc]
        yield lambda store=store: find_stalled_runs(store, workflows or _STORAGE_ONLY, utc_now())  # type: ignore[misc]


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


def _cleanup_document(rows: Sequence[_CleanupRow], dry_run: bool) -> dict[str, object]:
    items = [
        {
            "what": finding.kind.value,
            "where": finding.location,
            "name": finding.name,
            "state": state.replace(" ", "_"),
            "why": finding.reason,
        }
        for finding, state in rows
    ]
    return {"apiVersion": API_VERSION, "kind": "JanitorRound", "dry_run": dry_run, "items": items}
