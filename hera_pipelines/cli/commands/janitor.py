"""``tiphys janitor``: what nobody needs goes, and what nobody carries on is told; one round, by hand."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.text import Text
from tiphys_controller import API_VERSION
from tiphys_controller.cleanup import Found, Sight, litter, unfinished

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import ContextOption, KubeconfigOption, NamespaceOption, connect, existing_store
from tiphys.errors import TiphysError
from tiphys.records import utc_now
from tiphys.store import Store

if TYPE_CHECKING:
    from tiphys_controller.kubernetes.janitor import Look


EXAMPLES = """\b
Examples:
  tiphys janitor --dry-run
  tiphys janitor s3://ml/tiphys --cluster -n ml
  tiphys janitor s3://ml/tiphys --cluster -n ml --ledger-namespace tiphys --dry-run -o json
"""

_REMOVED, _WOULD, _LEFT = "removed", "would be removed", "left"
_STYLES = {_REMOVED: "red", _WOULD: "yellow"}
_STORAGE_ALONE = Sight(None, lambda _: True)


def janitor(
    command: typer.Context,
    stores: Annotated[
        list[str] | None,
        typer.Argument(metavar="STORE", help="Stores; else TIPHYS_STORE, else .tiphys/store here."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would happen and remove nothing.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Look at a cluster, too: agent pods, leases, Workflows that are gone.")
    ] = False,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    ledger_namespace: Annotated[
        str | None,
        typer.Option("--ledger-namespace", metavar="NAMESPACE", help="Where Tiphys is installed; else that of -n."),
    ] = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the answer.")] = Format.TABLE,
) -> None:
    """Go the janitor's round once, as the controller does each hour.

    Removes uploads that nobody has finished for a day, what is kept of alerts
    that were done with a week ago, and failed agent pods of Workflows that go
    on. Tells of runs that nothing carries on, and of leases that nobody counts
    on; those are for other commands, which it names.
    """
    screen: Screen = command.obj
    named: list[str | None] = [*stores] if stores else [None]
    places = [existing_store(screen, url) for url in named]
    rounds = _Round(dry_run)
    look = None
    if cluster or context or namespace or kubeconfig:
        look = _look(command, context, namespace, kubeconfig)
    else:
        screen.note("a cluster is not looked at without --cluster, nor its agent pods, leases and lost Workflows")
    sources = [*_of_cluster(look, places, ledger_namespace), *_of_stores(places, look.sight() if look else None)]
    for source in sources:
        rounds.go(source, screen)
    if output is Format.TABLE:
        _show(screen, rounds.rows, dry_run)
    else:
        screen.document(_document(rounds.rows, dry_run), output)
    for failure in rounds.failures[:1]:
        raise failure


class _Row(NamedTuple):
    found: Found
    state: str


Source = Callable[[], Iterable[Found]]
"""One kind of things in one place."""


@dataclass
class _Round:
    """What was come upon and what became of it; a source that fails does not keep the others from being looked at."""

    dry_run: bool
    rows: list[_Row] = field(default_factory=list)
    failures: list[TiphysError] = field(default_factory=list)

    def go(self, source: Source, screen: Screen) -> None:
        """Look at one source."""
        try:
            for found in source():
                self.rows.append(_Row(found, self._done(found)))
        except TiphysError as error:
            self.failures.append(error)
            if len(self.failures) > 1:  # the first one ends the command
                screen.note(str(error))

    def _done(self, found: Found) -> str:
        if found.remove is None:
            return _LEFT
        if self.dry_run:
            return _WOULD
        found.remove()
        return _REMOVED


def _look(command: typer.Context, context: str | None, namespace: str | None, kubeconfig: Path | None) -> "Look":
    from tiphys_controller.kubernetes.janitor import Look  # only a command that talks to a cluster needs it

    api = connect(kubeconfig, context, namespace)
    command.call_on_close(api.close)
    return Look(api)


def _of_cluster(look: "Look | None", stores: Sequence[Store], ledger_namespace: str | None) -> Iterator[Source]:
    if look is not None:
        yield lambda: look.agents(utc_now())
        yield lambda: look.leases(stores, ledger_namespace or look.namespace, utc_now())


def _of_stores(stores: Sequence[Store], sight: Sight | None) -> Iterator[Source]:
    for store in stores:
        yield lambda store=store: litter(store, utc_now())  # type: ignore[misc]
        yield lambda store=store: unfinished(store, sight or _STORAGE_ALONE, utc_now(), set())  # type: ignore[misc]


def _show(screen: Screen, rows: Sequence[_Row], dry_run: bool) -> None:
    if rows:
        columns = ("WHAT", "WHERE", "NAME", "STATE", "WHY")
        screen.table(columns, [_cells(*row) for row in rows])
    removable = sum(row.state != _LEFT for row in rows)
    would = "would be " if dry_run else ""
    left = f", {len(rows) - removable} left to others" if len(rows) > removable else ""
    screen.note(f"{removable} of {len(rows)} {would}removed{left}" if rows else "nothing is left over")


def _cells(found: Found, state: str) -> Sequence[str | Text]:
    return found.what.value, found.where, found.name, Text(state, style=_STYLES.get(state, "")), found.why


def _document(rows: Sequence[_Row], dry_run: bool) -> dict[str, object]:
    items = [
        {
            "what": found.what.value,
            "where": found.where,
            "name": found.name,
            "state": state.replace(" ", "_"),
            "why": found.why,
        }
        for found, state in rows
    ]
    return {"apiVersion": API_VERSION, "kind": "JanitorRound", "dry_run": dry_run, "items": items}
