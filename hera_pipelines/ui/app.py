"""The web application over a store: routes, limits and headers. It only reads, unless it is given actions.

The pages need no script; with one they convert times to the reader's zone, copy
commands, and follow a run that goes on. Nothing is loaded from elsewhere, and the
content security policy forbids it, so text in a record cannot make a browser run
or fetch anything.
"""

import contextlib
import shlex
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from functools import cache, wraps
from typing import Any, TypeVar
from urllib.parse import quote

import anyio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope
from tiphys_controller.plan.drift import format_drift
from tiphys_controller.run_phase import RunPhase
from tiphys_controller.submit.submitter import Submitter

from hera_pipelines.draw.lineage_graph import build_lineage_graphs
from hera_pipelines.draw.lineage_svg import render_lineage_svg
from hera_pipelines.draw.metric_plots import render_metrics_svg
from hera_pipelines.draw.queue_shares import render_shares_svg
from hera_pipelines.draw.report_html import format_share, format_time, render_chart_svg
from hera_pipelines.draw.templates import create_environment
from hera_pipelines.ui.action_routes import ActionRoutes
from hera_pipelines.ui.checkpoint_page import read_checkpoints_view
from hera_pipelines.ui.dag_picture import BOX_HEIGHT, BOX_WIDTH
from hera_pipelines.ui.gpu_page import GpuSource, WaitingRow, share_reads
from hera_pipelines.ui.home_page import HomeFilter, read_home_view
from hera_pipelines.ui.log_page import AttemptLogs, read_log_view
from hera_pipelines.ui.page_access import AllowedHosts
from hera_pipelines.ui.page_reads import PageReads, PagesBusyError, SharedViews, answer_while_connected
from hera_pipelines.ui.record_cache import RecordCache
from hera_pipelines.ui.run_index import RunIndex
from hera_pipelines.ui.run_page import MAX_ATTEMPTS, RunView, UsageReader, find_chart, open_history, read_run_view
from tiphys.errors import ConflictError, IntegrityError, NotFoundError, StoreError, TiphysError, UsageError
from tiphys.lineage.training_progress import describe_step, describe_training_progress, format_age
from tiphys.lineage.tree import read_lineage_tree
from tiphys.protocol.quantities import format_bytes
from tiphys.records import utc_now
from tiphys.store import Store

_PAGE_SECONDS = 30.0
"""Time for the storage requests of one page."""
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_PICTURE_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    # A form that a page without a referrer sends would say that it comes from nowhere (Fetch, "append Origin").
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_STATUS: tuple[tuple[type[TiphysError], int, str], ...] = (
    (NotFoundError, 404, "Not found"),
    (UsageError, 400, "This cannot be shown"),
    (ConflictError, 409, "This was refused"),
    (IntegrityError, 422, "A record is damaged"),
    (PagesBusyError, 503, "Many pages are asked for"),
    (StoreError, 503, "The store does not answer"),
)
MAX_CHECKPOINTS = 400
"""Most checkpoints in a picture: the newest of each step, each with an equal share."""
_DAYS = (1, 7, 30)
"""Lengths of the time axis of the page of queues."""
_Answer = TypeVar("_Answer")
_Handler = Callable[["_Pages", Request], Awaitable[Response]]
_RETRY_SECONDS = 5
"""After this time a client may ask again for a page that could not be read."""


def build_app(
    store: Store,
    submitter: Submitter | None = None,
    allowed_hosts: Sequence[str] = ("localhost", "127.0.0.1", "[::1]", "testserver"),
    index: RunIndex | None = None,
    find_logs: AttemptLogs | None = None,
    actions: ActionRoutes | None = None,
    gpus: GpuSource | None = None,
    clock: Callable[[], datetime] = utc_now,
) -> Starlette:
    """The application.

    ``allowed_hosts`` are the names by which the pages may be asked for, so that no page of another site can read them
    by a name of its own (DNS rebinding); ``*`` allows all. Without ``submitter`` storage alone is read, without
    ``find_logs`` there are no logs, without ``actions`` the pages only read, and without ``gpus`` there are no pages of
    queues and nodes.
    """
    runs = index or RunIndex(store, submitter)
    pages = _Pages(store, submitter, runs, find_logs or (lambda *_: ()), actions, gpus, clock)
    return Starlette(
        routes=[
            Route("/", pages.home),
            Route("/runs/{run}", pages.run),
            Route("/workflows/{workflow}", pages.workflow),
            *(actions.create_routes(pages) if actions is not None else ()),
            Route("/runs/{run}/logs/{step}", pages.logs),
            Route("/runs/{run}/checkpoints", pages.checkpoints),
            Route("/runs/{run}/{picture}.svg", pages.picture),
            *([Route("/queues", pages.queues)] if gpus is not None else []),
            *([Route("/queues/shares/{days}.svg", pages.shares)] if gpus is not None else []),
            *([Route("/nodes", pages.nodes)] if gpus is not None and gpus.has_nodes else []),
            Mount("/static", _OwnFiles(packages=[("hera_pipelines.ui", "static")])),
            Route("/{path:path}", pages.nothing),
        ],
        middleware=[
            Middleware(AllowedHosts, hosts=allowed_hosts),
            Middleware(GZipMiddleware),
        ],
    )


class _OwnFiles(StaticFiles):
    """Static files, with the headers of the pages."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        answer.headers.update(_HEADERS)
        return answer


def _within_limits(answer: _Handler) -> _Handler:
    """Give ``answer`` the time of a page, and the page of the error that it raises."""

    @wraps(answer)
    async def handle(pages: "_Pages", request: Request) -> Response:
        return await pages.within_limits(request, lambda: answer(pages, request))

    return handle


class _Pages:
    """Answers requests. Storage is read in threads, each page within `_PAGE_SECONDS`."""

    def __init__(
        self,
        store: Store,
        submitter: Submitter | None,
        index: RunIndex,
        find_logs: AttemptLogs,
        actions: ActionRoutes | None,
        gpus: GpuSource | None,
        clock: Callable[[], datetime],
    ) -> None:
        self._store = RecordCache(store)
        self._reads = PageReads(self._store)
        self._usages = UsageReader(clock, submitter)
        self._views = SharedViews[RunView]()
        self._submitter = submitter
        self._index = index
        self._find_logs = find_logs
        self._actions = actions
        self._queues = share_reads(gpus.read_queues) if gpus is not None else None
        self._nodes = share_reads(gpus.read_nodes) if gpus is not None and gpus.has_nodes else None
        self._clock = clock

    @_within_limits
    async def home(self, request: Request) -> Response:
        chosen = HomeFilter.from_query(request.query_params)
        view = read_home_view(self._index, chosen)
        return self.render("home.html.jinja", view=view, chosen=chosen, phases=list(RunPhase))

    @_within_limits
    async def run(self, request: Request) -> Response:
        number, run = _read_number(request, "submission"), request.path_params["run"]
        page, outputs_page = _read_number(request, "page") or 1, _read_number(request, "outputs") or 1
        places = (run, number, page, outputs_page)
        view = await self._reads.read(
            lambda store: self._views.read(
                places,
                lambda: read_run_view(store, self._usages, self._submitter, *places, self._clock(), self._find_logs),
            )
        )
        offer = None
        if (actions := self._actions) is not None:
            offer = await self._reads.read(lambda _: actions.describe_offer(request, view.detail, view.last_submission))
        waiting = await self._reads.read(lambda _: self._find_waiting(view))
        sizes = {"box_width": BOX_WIDTH, "box_height": BOX_HEIGHT, "max_attempts": MAX_ATTEMPTS}
        return self.render(
            "run.html.jinja",
            view=view,
            offer=offer,
            waiting=waiting,
            known_runs=self._list_known_runs(),
            **sizes,
        )

    async def workflow(self, request: Request) -> Response:
        """The page of the run of a Workflow, to which Argo's pages can link; the first Workflow has the run's name."""
        run, number = self._index.find_workflow(name := request.path_params["workflow"]) or (name, 0)
        suffix = f"?submission={number}" if number else ""
        return RedirectResponse(f"/runs/{quote(run, safe='')}{suffix}", 303, _HEADERS)

    @_within_limits
    async def logs(self, request: Request) -> Response:
        run, step, number = *request.path_params.values(), _read_number(request, "attempt")
        view = await self._reads.read(
            lambda store: read_log_view(open_history(store, run), self._find_logs, step, number)
        )
        return self.render("log.html.jinja", view=view)

    @_within_limits
    async def checkpoints(self, request: Request) -> Response:
        run = request.path_params["run"]
        view = await self._reads.read(lambda store: read_checkpoints_view(store, run, self._clock()))
        return self.render("checkpoints.html.jinja", view=view)

    @_within_limits
    async def picture(self, request: Request) -> Response:
        run, name = request.path_params.values()
        return _picture(await self._reads.read(lambda store: self._draw_run(store, run, name)))

    @_within_limits
    async def queues(self, request: Request) -> Response:
        queues, chosen = self._queues, request.query_params.get("queue", "")
        assert queues is not None
        view = await self._reads.read(lambda _: queues())
        return self.render(
            "queues.html.jinja",
            view=view.only(chosen),
            chosen=chosen,
            known_runs=self._list_known_runs(),
            days=_read_days(request.query_params.get("days", "1")),
            day_choices=_DAYS,
        )

    @_within_limits
    async def shares(self, request: Request) -> Response:
        days = _read_days(request.path_params["days"])
        return _picture(await self._reads.read(lambda _: self._draw_shares(days)))

    @_within_limits
    async def nodes(self, request: Request) -> Response:  # noqa: ARG002
        nodes = self._nodes
        assert nodes is not None
        return self.render("nodes.html.jinja", view=await self._reads.read(lambda _: nodes()))

    async def nothing(self, request: Request) -> Response:
        return self.render_error(404, "Not found", f"there is no page {request.url.path}")

    def _list_known_runs(self) -> set[str]:
        """Runs that have a page, of those that were read so far."""
        return {run.summary.run for run in self._index.runs}

    def _find_waiting(self, view: RunView) -> list[WaitingRow]:
        """Requests of a run that wait for GPUs; none if the ledger does not answer, which its own page says."""
        if self._queues is None or not view.is_live:
            return []
        try:
            return [row for row in self._queues().waiting if row.request.run == view.detail.summary.run]
        except TiphysError:
            return []

    def _draw_run(self, store: Store, run: str, picture: str) -> str:
        if picture not in ("lineage", "metrics"):
            chart = find_chart(picture)
            return render_chart_svg(chart(self._usages.measure(open_history(store, run)).steps))
        tree = read_lineage_tree(open_history(store, run, MAX_CHECKPOINTS), MAX_CHECKPOINTS)
        if picture == "metrics":
            return render_metrics_svg(f"Metrics of {run}", tree)
        return render_lineage_svg(f"Lineage of {run}", build_lineage_graphs(tree))

    def _draw_shares(self, days: int) -> str:
        assert self._queues is not None
        now, quotas = self._clock(), dict[str, int]()
        with contextlib.suppress(TiphysError):  # the page says so; what was held is known without the ledger
            quotas = self._queues().quotas
        holds = (hold for run in self._index.runs for hold in run.holds)
        title = f"GPUs held by queue in the last {'day' if days == 1 else f'{days} days'}"
        if not self._index.is_whole:
            title += f", by the newest {self._index.total:,} runs"
        return render_shares_svg(title, holds, now - timedelta(days=days), now, quotas)

    async def read_in_turn(self, read: Callable[[Store], _Answer]) -> _Answer:
        """What ``read`` returns, called in a thread with the store once there is room for it."""
        return await self._reads.read(read)

    async def within_limits(
        self, request: Request, answer: Callable[[], Awaitable[Response]], seconds: float | None = None
    ) -> Response:
        """The answer, or the page of the error that it raises; None: within `_PAGE_SECONDS`."""
        limit = _PAGE_SECONDS if seconds is None else seconds

        async def answer_or_explain() -> Response:
            try:
                with anyio.fail_after(limit):
                    return await answer()
            except TimeoutError:
                return self.render_error(503, "The store is slow", f"it did not answer within {limit:g} s; load again")
            except TiphysError as error:
                status, title = next(
                    ((code, words) for kind, code, words in _STATUS if isinstance(error, kind)),
                    (500, "This went wrong"),
                )
                return self.render_error(status, title, str(error))

        if request.method == "POST":  # its body must be read, and what was confirmed is done
            return await answer_or_explain()
        return await answer_while_connected(request, answer_or_explain)

    def render(self, template: str, status: int = 200, **values: Any) -> Response:
        places = {"shows_queues": self._queues is not None, "shows_nodes": self._nodes is not None}
        text = _load_template(template).render(store=self._store.url, now=self._clock(), **places, **values)
        headers = {**_HEADERS, "Retry-After": str(_RETRY_SECONDS)} if status == 503 else _HEADERS
        return HTMLResponse(text, status, headers)

    def render_error(self, status: int, title: str, message: str) -> Response:
        return self.render("error.html.jinja", status, title=title, message=message)


def _picture(svg: str) -> Response:
    headers = {**_HEADERS, "Content-Security-Policy": _PICTURE_POLICY}
    return Response(svg, media_type="image/svg+xml", headers=headers)


def _read_days(text: str) -> int:
    if text not in map(str, _DAYS):
        raise UsageError(f"days={text!r} is no choice; there are {', '.join(map(str, _DAYS))}")
    return int(text)


def _read_number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UsageError(f"{name}={text!r} is no number")
    return int(text)


@cache
def _load_template(name: str) -> Any:
    environment = create_environment("hera_pipelines.ui", "templates")
    environment.filters |= {
        "address": lambda text: quote(text, safe=""),
        "share": format_share,
        "duration": format_time,
        "bytes": format_bytes,
        "slug": lambda state: state.value.replace(" ", "-").lower(),
        "iso": lambda moment: moment.isoformat(timespec="seconds"),
        "clock": lambda moment: moment.strftime("%Y-%m-%d %H:%M:%S UTC"),
        "words": lambda text: text.replace("_", " "),
    }
    environment.globals |= {"age": lambda now, moment: format_age(now - moment), "quote": shlex.quote}
    environment.globals |= {"format_drift": format_drift, "describe_step": describe_step}
    environment.globals["describe_training_progress"] = describe_training_progress
    return environment.get_template(name)
