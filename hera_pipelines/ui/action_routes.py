"""Routes of the actions: sign in, look at a plan, confirm it. Without them the application answers only ``GET``."""

import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, quote

import anyio.to_thread
import structlog
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from tiphys_controller.runs import RunDetail
from tiphys_controller.submit.submitter import Submitter

from hera_pipelines.ui.page_access import PageAccess, Visitor, find_origin_fault
from hera_pipelines.ui.run_actions import (
    ActionDesk,
    ActionRequest,
    RunAction,
    RunActionBackend,
    list_offered_actions,
    read_action_view,
)
from tiphys.errors import UsageError
from tiphys.service.http_server import BodyBudget
from tiphys.store import Store, Submission

_MAX_FORM_BYTES = 64 << 10
_MAX_CLIENT_BYTES, _MAX_BYTES = 1 << 20, 4 << 20
"""Forms in flight of one address, and in all."""
_MAX_FIELDS = 500
_ACTION_SECONDS = 150.0
"""Time for an action, which may wait for a cluster."""
_PARAMETER_PREFIX = "parameter."
_MAX_NAME_CHARACTERS = 100
_Answer = TypeVar("_Answer")
_log = structlog.get_logger()


class PageRenderer(Protocol):
    """What makes pages of templates."""

    def render(self, template: str, status: int = 200, **values: Any) -> Response:
        """Render a page."""

    def render_error(self, status: int, title: str, message: str) -> Response:
        """Render the page of an error."""

    async def within_limits(
        self, request: Request, answer: Callable[[], Awaitable[Response]], seconds: float | None = None
    ) -> Response:
        """The answer, or the page of the error that it raises; None: within the time of a page."""

    async def read_in_turn(self, read: Callable[[Store], _Answer]) -> _Answer:
        """What ``read`` returns, called in a thread once there is room for it."""


class ActionRoutes:
    """Lets visitors act: ``backend`` has the effects, and ``access`` recognizes visitors.

    Events are written to ``store``. ``submitter`` finds the Workflows of runs; None: storage alone.
    """

    def __init__(
        self, store: Store, backend: RunActionBackend, access: PageAccess, submitter: Submitter | None = None
    ) -> None:
        self._store = store
        self._backend = backend
        self._access = access
        self._submitter = submitter
        self._desk = ActionDesk(store, backend)
        self._bodies = BodyBudget(_MAX_FORM_BYTES, _MAX_CLIENT_BYTES, _MAX_BYTES)

    def create_routes(self, pages: PageRenderer) -> list[Route]:
        """All routes; ``pages`` renders them."""
        return [
            Route("/sign-in", self._make_handler(pages, self._sign_in), methods=["GET", "POST"]),
            Route("/sign-out", self._make_handler(pages, self._sign_out), methods=["POST"]),
            *(
                Route(f"/runs/{{run}}/{action}", self._make_action_handler(pages, action), methods=["GET", "POST"])
                for action in RunAction
            ),
        ]

    def describe_offer(self, request: Request, detail: RunDetail, last: Submission | None) -> dict[str, Any]:
        """What the page of a run says about actions: those that are offered, to whom, and why not.

        ``last`` is the newest submission of the run.
        """
        visitor = self._access.identify(request)
        return {
            "visitor": visitor,
            "can_sign_out": self._access.is_signed_in(visitor),
            "takes_token": self._access.takes_token,
            "obstacle": self._backend.find_obstacle(detail.summary.run, last),
            "offered": list_offered_actions(detail),
        }

    def _make_handler(
        self, pages: PageRenderer, handle: Callable[[PageRenderer, Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await pages.within_limits(request, lambda: handle(pages, request), _ACTION_SECONDS)

        return answer

    def _make_action_handler(self, pages: PageRenderer, action: RunAction) -> Callable[[Request], Awaitable[Response]]:
        async def handle(pages: PageRenderer, request: Request) -> Response:
            visitor = self._access.identify(request)
            if request.method == "POST":
                return await self._confirm(pages, request, visitor, action)
            if not visitor.identity:
                return self._ask_for_sign_in(pages, request)
            return await self._show_plan(pages, request, visitor, action)

        return self._make_handler(pages, handle)

    def _ask_for_sign_in(self, pages: PageRenderer, request: Request) -> Response:
        if self._access.takes_token:
            return RedirectResponse(f"/sign-in?next={quote(request.url.path)}", 303)
        return pages.render_error(403, "Nobody is signed in", "The proxy before these pages named no visitor.")

    async def _sign_in(self, pages: PageRenderer, request: Request) -> Response:
        if not self._access.takes_token:
            return pages.render_error(404, "Not found", "these pages take no token; the proxy names the visitors")
        target = _read_target(request.query_params.get("next", ""))
        if request.method == "GET":
            return pages.render("sign_in.html.jinja", target=target, fault="")
        form = await self._read_form(request)
        if fault := find_origin_fault(request):
            return self._refuse(pages, request, fault)
        session = self._access.sign_in(form.get("token", ""))
        if session is None:
            _log.warning("page.sign_in_refused", client=_read_address(request))
            return pages.render("sign_in.html.jinja", 403, target=target, fault="This is not the token.")
        response = RedirectResponse(target, 303)
        self._access.keep_session(request, response, session)
        return response

    async def _sign_out(self, pages: PageRenderer, request: Request) -> Response:
        form = await self._read_form(request)
        visitor = self._access.identify(request)
        if fault := self._access.find_form_fault(request, visitor, form):
            return self._refuse(pages, request, fault)
        self._access.sign_out(visitor.session)
        return RedirectResponse("/", 303)

    async def _show_plan(self, pages: PageRenderer, request: Request, visitor: Visitor, action: RunAction) -> Response:
        run, name = request.path_params["run"], request.query_params.get("name", "")[:_MAX_NAME_CHARACTERS]
        parameters = _read_parameters(request.query_params)
        nonce = secrets.token_hex(8)
        view = await pages.read_in_turn(
            lambda store: read_action_view(store, self._backend, self._submitter, action, run, nonce, name, parameters)
        )
        response = pages.render("action.html.jinja", view=view, visitor=visitor, prefix=_PARAMETER_PREFIX)
        self._access.keep_session(request, response, visitor.session)
        return response

    async def _confirm(self, pages: PageRenderer, request: Request, visitor: Visitor, action: RunAction) -> Response:
        form = await self._read_form(request)
        if fault := self._access.find_form_fault(request, visitor, form):
            return self._refuse(pages, request, fault)
        asked = ActionRequest(
            action=action,
            run=request.path_params["run"],
            after=_parse_number(form.get("after", "")),
            by=visitor.identity,
            nonce=_parse_nonce(form.get("nonce", "")) if action is RunAction.FORK else "",
            name=form.get("name", "") if action is RunAction.FORK else "",
            parameters=_read_parameters(form) if action is RunAction.FORK else {},
        )
        _log.info(
            "page.action_confirmed", action=action.value, run=asked.run, by=asked.by, client=_read_address(request)
        )
        shown = await anyio.to_thread.run_sync(lambda: self._desk.carry_out(asked), abandon_on_cancel=True)
        return RedirectResponse(f"/runs/{quote(shown, safe='')}", 303)

    async def _read_form(self, request: Request) -> dict[str, str]:
        """Fields of a form; of equal names the last one.

        Raises:
            UsageError: the body is no form, or too large.
            StoreError: too many forms are sent at once.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
            raise UsageError("the request holds no form")
        try:
            async with self._bodies.read_body(request, _read_address(request)) as body:
                return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS))
        except ValueError as error:
            raise UsageError(f"the form cannot be read: {error}") from error

    def _refuse(self, pages: PageRenderer, request: Request, fault: str) -> Response:
        _log.warning("page.form_refused", path=request.url.path[:200], reason=fault, client=_read_address(request))
        return pages.render_error(403, "This was refused", f"Nothing was done: {fault}.")


def _read_parameters(fields: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(_PARAMETER_PREFIX): value
        for name, value in fields.items()
        if name.startswith(_PARAMETER_PREFIX)
    }


def _read_target(path: str) -> str:
    """Where to go after signing in: a page of a run, never another site."""
    return path if path.startswith("/runs/") and path.isprintable() and "\\" not in path else "/"


def _parse_number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UsageError("the form names no submission; load its page again")
    return int(text)


def _parse_nonce(text: str) -> str:
    if not text.isascii() or not text.isalnum() or len(text) > 64:
        raise UsageError("the form has no number of its own; load its page again")
    return text


def _read_address(request: Request) -> str:
    return request.client.host if request.client else ""
