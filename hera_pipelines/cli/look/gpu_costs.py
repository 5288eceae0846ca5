"""``tiphys report --by namespace``: GPU hours of tenants and what they cost, by month."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tiphys_controller.goodput import GpuTime, measure_gpu_time
from tiphys_plugin.quota.queues import Queues, load_queues

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import choose_store, existing_store
from hera_pipelines.draw.report_html import NONE
from tiphys.errors import UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.quantities import parse_duration_seconds
from tiphys.records import utc_now
from tiphys.store import list_runs
from tiphys.store.open import PLACEHOLDER

_HOUR = 3600.0


def show_gpu_costs(
    screen: Screen, store: str | None, namespaces: Sequence[str], since: str, queues: Path | None, output: Format
) -> None:
    """Show GPU hours and cost of each namespace and month.

    Raises:
        UsageError: an option is not valid; the message says which.
    """
    now = utc_now()
    begin = parse_since(since, now)
    prices = load_queues(queues) if queues is not None else None
    url = choose_store(store).value
    if PLACEHOLDER in url and not namespaces:
        raise UsageError(f"{url} holds a store for each namespace; name those of the report: -n team-a -n team-b")
    if PLACEHOLDER not in url and len(namespaces) > 1:
        raise UsageError(f"{url} is the store of one namespace; give the URL with {PLACEHOLDER}, or one -n")
    times = measure_gpu_time(_read_histories(screen, store, url, namespaces), begin, now)
    costs = [_find_cost(time, prices) for time in times]
    unpriced = {time.gpu_kind or "an unnamed type" for time, cost in zip(times, costs, strict=True) if cost is None}
    if unpriced:
        screen.note(
            f"no price is known of {', '.join(sorted(unpriced))}; give a queue file with gpu_prices by flavor or type, "
            "such as `gpu_prices: {A100: 2.5}`, with --queues FILE"
        )
    if output is not Format.TABLE:
        rows = [{**time.model_dump(), "cost": cost} for time, cost in zip(times, costs, strict=True)]
        since, until = begin.isoformat(), now.isoformat()
        screen.typed_document("CostReport", output, since=since, until=until, costs=rows)
        return
    screen.table(["MONTH", "NAMESPACE", "GPUS OF", "GPU HOURS", "COST"], _rows(times, costs))


def parse_since(text: str, now: datetime) -> datetime:
    """The beginning that ``--since`` names: a month, a day, or a time before ``now``; the earliest for an empty text.

    Raises:
        UsageError: it is none of them.
    """
    if not text:
        return datetime.min.replace(tzinfo=UTC)
    for form in ("%Y-%m", "%Y-%m-%d"):
        try:
            return datetime.strptime(text, form).replace(tzinfo=UTC)
        except ValueError:
            continue
    try:
        return now - timedelta(seconds=parse_duration_seconds(text))
    except (UsageError, OverflowError) as error:
        raise UsageError(f"--since {text!r} is no month, day or duration; write 2026-11, 2026-11-15 or 30d") from error


def _read_histories(
    screen: Screen, given: str | None, url: str, namespaces: Sequence[str]
) -> Iterator[tuple[str, RunHistory]]:
    if PLACEHOLDER in url:
        stores = [(name, existing_store(screen, url.replace(PLACEHOLDER, name))) for name in namespaces]
    else:
        opened = existing_store(screen, given)
        stores = [(next(iter(namespaces), opened.namespace), opened)]
    for namespace, store in stores:
        yield from ((namespace, RunHistory.for_display(store, run)) for run in list_runs(store))


def _find_cost(time: GpuTime, queues: Queues | None) -> float | None:
    price = None if queues is None else queues.find_gpu_price(time.gpu_kind)
    return None if price is None else time.gpu_seconds / _HOUR * price


def _rows(times: Sequence[GpuTime], costs: Iterable[float | None]) -> Iterator[list[str]]:
    for time, cost in zip(times, costs, strict=True):
        hours, price = f"{time.gpu_seconds / _HOUR:,.1f}", NONE if cost is None else f"{cost:,.2f}"
        yield [time.month, time.namespace or NONE, time.gpu_kind or NONE, hours, price]
