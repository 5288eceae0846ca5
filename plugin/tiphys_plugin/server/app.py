"""The service as Argo's agent sees it: HTTP around the plugin.

What a status means to the agent decides which one is sent (Argo Workflows,
``workflow/util/plugin``): 503 is repeated, 404 switches the plugin off until
the agent restarts, and any other error fails the node at once, so neither of
the last two is ever an answer to a call that carries our token. The sidecar
hands on nothing but 200 and 503.

Run the service in a thread: for the local engine and for tests. `AppServer` is what every process listens with.
"""

import json
from collections.abc import Callable
from typing import Any

import anyio
import structlog
from anyio import to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tiphys.errors import StoreError
from tiphys.protocol.execute_api import ExecuteReply
from tiphys.service.http_server import AppServer, BodyTooLargeError, read_body
from tiphys_plugin.core import PluginCore
from tiphys_plugin.server.authentication import Authenticator, Caller, SharedToken, UnauthenticatedError
from tiphys_plugin.server.tenants import TenantChecks, Tenants, TrespassError

EXECUTE_PATH = "/api/v1/template.execute"
_LARGEST_BODY_BYTES = 2 << 20
"""A task set, which holds the templates of a whole workflow, is one object of about 1.5 MB."""
_MOST_CALLS = 96
"""Calls that are answered at once; others wait for a thread. Probes and metrics have threads of their own."""
_log = structlog.get_logger()

Plugin = Callable[[Caller, dict[str, Any]], ExecuteReply]
"""Answers a document of a caller. Raises `StoreError` and `TrespassError`."""


def create_app(core: PluginCore, token: str) -> Starlette:
    """One plugin for everybody on this machine. ``token`` is what Argo sends as ``Authorization: Bearer``."""

    def ready() -> Response:
        try:
            core.check()
        except StoreError as error:
            return _error(503, str(error))
        return PlainTextResponse("ok\n")

    door = _Door(SharedToken(token), lambda _, document: core.execute_document(document))
    return Starlette(
        routes=[Route(EXECUTE_PATH, door.execute, methods=["POST"]), *_status_routes(ready, core.metrics.render)]
    )


def create_service_app(tenants: Tenants, checks: TenantChecks, authenticator: Authenticator) -> Starlette:
    """The plugin of a cluster: what a caller may touch follows from its token."""
    door = _Door(authenticator, lambda caller, document: tenants.execute(caller.namespace or "", document))
    routes = _status_routes(lambda: JSONResponse(checks.state()), tenants.render)
    return Starlette(routes=[Route(EXECUTE_PATH, door.execute, methods=["POST"]), *routes])


def create_status_app(state: Callable[[], dict[str, Any]], render: Callable[[], bytes]) -> Starlette:
    """Health, readiness and metrics of a process that answers no calls."""
    return Starlette(routes=_status_routes(lambda: JSONResponse(state()), render))


def _status_routes(ready: Callable[[], Response], render: Callable[[], bytes]) -> list[Route]:
    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        return await run_in_threadpool(ready)

    async def metrics(_: Request) -> Response:
        text = await run_in_threadpool(render)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return [Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)]


class _Door:
    """Lets callers in and says in a status code what came of it."""

    def __init__(self, authenticator: Authenticator, plugin: Plugin) -> None:
        self._authenticator = authenticator
        self._plugin = plugin
        self._threads = anyio.CapacityLimiter(_MOST_CALLS)

    async def execute(self, request: Request) -> Response:
        try:
            caller = await to_thread.run_sync(self._authenticator.caller, _bearer(request), limiter=self._threads)
            document = json.loads(await read_body(request, _LARGEST_BODY_BYTES))
        except UnauthenticatedError as error:
            _log.warning("call.forbidden", client=_client(request), path=request.url.path)
            return _error(403, str(error))
        except StoreError as error:
            _log.error("call.unreviewed", error=str(error))
            return _error(503, f"nobody can say whose token this is: {error}")
        except BodyTooLargeError as error:
            return _error(413, str(error))
        except ValueError as error:
            return _error(400, f"the body is not JSON: {error}")
        if not isinstance(document, dict):
            return _error(400, "the body is not a JSON object")
        return await to_thread.run_sync(self._answer, request, caller, document, limiter=self._threads)

    def _answer(self, request: Request, caller: Caller, document: dict[str, Any]) -> Response:
        try:
            return JSONResponse(self._plugin(caller, document).to_json())
        except TrespassError as error:
            _log.warning("call.trespassed", client=_client(request), reason=str(error))
            return _error(403, str(error))
        except StoreError as error:
            return _error(503, str(error))
        except Exception as error:  # noqa: BLE001  the HTTP boundary
            # A bug of ours. 500 would fail the node at once; 503 has Argo ask again for a while, which
            # heals what was a race, and fails the node with this sentence if it was not.
            _log.exception("call.crashed")
            return _error(503, f"the plugin failed on this call ({type(error).__name__}); its log has the trace")


def _bearer(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme == "Bearer" else ""


def _client(request: Request) -> str:
    return request.client.host if request.client else ""


def _error(status: int, sentence: str) -> Response:
    return JSONResponse({"error": sentence}, status_code=status)


__all__ = ["AppServer", "PluginServer"]


class PluginServer(AppServer):
    """One plugin for everybody on this machine who has the token.

    Raises:
        ConflictError: the port is in use.
        UsageError: the token is empty, or the host cannot be listened on.
    """

    def __init__(self, core: PluginCore, token: str, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(create_app(core, token), host, port)
