"""``tiphys gc``: which checkpoints stay and why, and the deletion of the others."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

import typer
from rich.progress import track
from rich.text import Text
from tiphys_controller import API_VERSION

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import StoreOption, existing_store
from hera_pipelines.draw.lineage_graph import size_text
from tiphys.errors import TiphysError, UsageError
from tiphys.lineage.retention.gc import Account, Action, Fate, OutOfSight, run_lineages
from tiphys.protocol.quantities import seconds
from tiphys.protocol.step_spec import Keep, parse_best, parse_every
from tiphys.records import utc_now
from tiphys.store import Store, list_runs

EXAMPLES = """\b
Examples:
  tiphys gc digits-7xk2p --dry-run
  tiphys gc digits-7xk2p --keep-last 1 --keep-best loss:min --delay 0s
  tiphys gc --all --store s3://ml/tiphys
  tiphys gc --all -o json | jq '[.lineages[].freed_bytes] | add'
"""

_STYLES = {Action.DELETE: "red", Action.MARK: "yellow", Action.WAIT: "yellow"}
_DID = {Action.KEEP: "kept", Action.MARK: "marked", Action.WAIT: "marked", Action.DELETE: "deleted"}
_WOULD = {**_DID, Action.MARK: "would be marked", Action.DELETE: "would be deleted"}


@dataclass(frozen=True)
class Wanted:
    """What the call says about what is kept; None leaves that to the run's own policy."""

    last: int | None
    every_steps: int | None
    best: str | None
    delay_seconds: float | None

    def applied(self, policy: Keep | None) -> Keep | None:
        """``policy`` with what the call wants otherwise."""
        if policy is None and self.last is None:
            if self.every_steps or self.best:
                raise UsageError("the run keeps all its checkpoints; say with --keep-last how many of the newest stay")
            return None
        changes = {
            "last": self.last,
            "every_steps": self.every_steps,
            "best": parse_best(self.best, "--keep-best ") if self.best else None,
            "delay_seconds": self.delay_seconds,
        }
        given = {name: value for name, value in changes.items() if value is not None}
        return policy.model_copy(update=given) if policy else Keep(**{"last": 1, **given})


def gc(
    context: typer.Context,
    run: Annotated[str | None, typer.Argument(help="Name of the run.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All runs of the store.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would happen and write nothing.")] = False,
    delay: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long a marked checkpoint stays, such as 10m or 0s.")
    ] = None,
    keep_last: Annotated[int | None, typer.Option(min=1, metavar="N", help="The newest N valid ones.")] = None,
    keep_every: Annotated[str | None, typer.Option(metavar="STEPS", help="Anchors, such as '1000 steps'.")] = None,
    keep_best: Annotated[str | None, typer.Option(metavar="METRIC", help="The best, such as loss:min:2.")] = None,
    store: StoreOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the answer.")] = Format.TABLE,
) -> None:
    """Mark checkpoints that nothing keeps, and delete those that were marked long enough ago.

    What is kept is what the step asked for; options say otherwise for this
    call. Pinned and quarantined checkpoints stay, and so does what an attempt
    started from. Training programs do the same after each save; this is for
    what they leave behind. It is safe beside them.
    """
    screen: Screen = context.obj
    if (run is None) is not everything:
        raise UsageError("name one run, or give --all for all runs of the store")
    wanted = Wanted(
        last=keep_last,
        every_steps=parse_every(keep_every, "--keep-every ") if keep_every else None,
        best=keep_best,
        delay_seconds=None if delay is None else seconds(delay),
    )
    wanted.applied(Keep(last=1))  # so that a typing error is told before anything is read
    place = existing_store(screen, store)
    found, failures = _collect(screen, place, [run] if run else list(list_runs(place)), wanted, dry_run)
    if output is Format.TABLE:
        _show(screen, found, dry_run)
    else:
        screen.document(_document(place, found, dry_run), output)
    for failure in failures[:1]:
        raise failure


def _collect(
    screen: Screen, store: Store, runs: list[str], wanted: Wanted, dry_run: bool
) -> tuple[list[Account], list[TiphysError]]:
    """What became of each lineage; one run that cannot be read does not keep the others from being cleaned."""
    found: list[Account] = []
    failures: list[TiphysError] = []
    for run in _progress(screen, runs):
        try:
            for lineage in run_lineages(store, run, wanted.applied):
                if isinstance(lineage, OutOfSight):
                    screen.note(f"{lineage.lineage}: its checkpoints cannot be seen from here: {lineage.reason}")
                else:
                    found.append(lineage.foresee() if dry_run else lineage.collect())
        except TiphysError as error:
            failures.append(error)
            if len(runs) > 1:
                screen.note(f"{run}: {error}")
    return found, failures


def _progress(screen: Screen, runs: list[str]) -> Iterable[str]:
    quiet = screen.quiet or len(runs) < 2 or not screen.err.is_terminal
    return track(runs, "collecting", console=screen.err, transient=True, disable=quiet)


def _show(screen: Screen, accounts: list[Account], dry_run: bool) -> None:
    rows = [(account, fate) for account in accounts for fate in account.fates]
    if rows:
        screen.table(("LINEAGE", "CHECKPOINT", "SIZE", "STATE", "WHY"), [_row(*row, dry_run) for row in rows])
    freed, swept = (sum(getattr(account, name) for account in accounts) for name in ("freed_bytes", "swept_bytes"))
    gone = sum(fate.action is Action.DELETE for _, fate in rows)
    would = "would be " if dry_run else ""
    saves = f", {size_text(swept)} of it from saves that died" if swept else ""
    screen.note(f"{gone} of {len(rows)} checkpoints {would}deleted, {size_text(freed)} {would}freed{saves}")


def _row(account: Account, fate: Fate, dry_run: bool) -> Sequence[str | Text]:
    words = _WOULD if dry_run else _DID
    state = Text(words.get(fate.action, fate.action), style=_STYLES.get(fate.action, ""))
    why = ", ".join(fate.reasons) or _until(account, fate)
    return account.lineage.lineage, str(fate.checkpoint), size_text(fate.size_bytes), state, why


def _until(account: Account, fate: Fate) -> str:
    if fate.action is Action.DELETE or account.lineage.keep is None:
        return "nothing keeps it"
    since = fate.marked_at or utc_now()
    due = since + timedelta(seconds=account.lineage.keep.delay_seconds)
    return f"nothing keeps it; may be deleted from {due.astimezone():%Y-%m-%d %H:%M:%S} on"


def _document(store: Store, accounts: list[Account], dry_run: bool) -> dict[str, object]:
    lineages = [
        {
            "run": account.lineage.run,
            "step": account.lineage.step,
            "lineage": account.lineage.lineage,
            "store": account.lineage.store.url,
            "keep": account.lineage.keep.model_dump(mode="json") if account.lineage.keep else None,
            "freed_bytes": account.freed_bytes,
            "swept_bytes": account.swept_bytes,
            "checkpoints": [_entry(fate) for fate in account.fates],
        }
        for account in accounts
    ]
    return {
        "apiVersion": API_VERSION,
        "kind": "Retention",
        "store": store.url,
        "dry_run": dry_run,
        "lineages": lineages,
    }


def _entry(fate: Fate) -> dict[str, object]:
    return {
        "checkpoint": str(fate.checkpoint),
        "action": fate.action.value,
        "reasons": list(fate.reasons),
        "marked_at": fate.marked_at.isoformat() if fate.marked_at else None,
        "size_bytes": fate.size_bytes,
    }
