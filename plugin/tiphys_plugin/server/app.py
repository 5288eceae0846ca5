"""The HTTP interface of the plugin, for Argo's agent and the sidecars.

The status codes follow from their meaning to Argo's agent (Argo Workflows,
``workflow/util/plugin``): it repeats a 503, disables the plugin until the agent
restarts after a 404, and fails the node at once after any other error. So a call
with the right token gets 200 or 503. The sidecar passes on only these two.

`PluginServer` runs one core in a thread, for the local engine and tests.
The service and the shared agent use `AppServer` themselves.
"""

from collections.abc import Callable, Mapping
from typing import Any

import anyio
import structlog
from anyio import to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tiphys.errors import StoreError, UsageError
from tiphys.protocol.execute_api import ExecuteReply
from tiphys.protocol.json_documents import parse_json
from tiphys.service.http_server import CLOSE_CONNECTION, AppServer, BodyBudget, BodyLengthError, BodyTooLargeError
from tiphys_plugin.core import PluginCore
from tiphys_plugin.server.authentication import Authenticator, Caller, SharedTokenAuthenticator, UnauthenticatedError
from tiphys_plugin.server.tenants import ForbiddenNamespaceError, TenantChecks, Tenants
from tiphys_plugin.sidecar.forwarding import EXECUTE_PATH, MAX_BODY_BYTES
from tiphys_plugin.sidecar.outages import OutageClock

_MAX_CONCURRENT_CALLS = 96
"""Calls that are answered concurrently; further calls wait for a thread. Probes, metrics and reviews of tokens have
other threads."""
_MAX_VALUES = 50_000
"""Values in the JSON of a call, which cost some 100 bytes each. A template has hundreds."""
_MAX_TENANT_BYTES, _MAX_BYTES = 2 * MAX_BODY_BYTES, 8 * MAX_BODY_BYTES
"""Bodies of one namespace, and of all, that are in memory at once. Most calls have some KiB."""
_log = structlog.get_logger()

ExecuteHandler = Callable[[Caller, dict[str, Any]], ExecuteReply]
"""Answers the request document of a caller. Raises `StoreError` and `ForbiddenNamespaceError`."""


def create_app(core: PluginCore, token: str) -> Starlette:
    """Build the app of one core without tenants; callers send ``token`` as ``Authorization: Bearer``.

    No sidecar is before it, so it answers calls that storage, ledger or cluster did not answer itself.
    """

    def ready() -> Response:
        try:
            core.check()
        except StoreError as error:
            return _error_response(503, str(error))
        return PlainTextResponse("ok\n")

    outages = OutageClock()

    def execute(_: Caller, document: dict[str, Any]) -> ExecuteReply:
        try:
            reply = core.execute_document(document)
        except StoreError as error:
            return ExecuteReply.model_validate(outages.answer(document, str(error)))
        if reply.node is not None:
            outages.end(document)
        return reply

    endpoint = _ExecuteEndpoint(SharedTokenAuthenticator(token), execute)
    return Starlette(
        routes=[Route(EXECUTE_PATH, endpoint.execute, methods=["POST"]), *_status_routes(ready, core.metrics.render)]
    )


def create_service_app(tenants: Tenants, checks: TenantChecks, authenticator: Authenticator) -> Starlette:
    """Build the app of a cluster's plugin. Permissions follow the caller's token, never the request body."""
    endpoint = _ExecuteEndpoint(
        authenticator, lambda caller, document: tenants.execute(caller.namespace or "", document)
    )
    routes = _status_routes(lambda: JSONResponse(checks.public_status_document()), tenants.render)
    return Starlette(routes=[Route(EXECUTE_PATH, endpoint.execute, methods=["POST"]), *routes])


def create_status_app(state: Callable[[], dict[str, Any]], render: Callable[[], bytes]) -> Starlette:
    """Build an app with health, readiness and metrics only, for a process that gets no calls."""
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


class _ExecuteEndpoint:
    """Authenticates callers, and maps the outcome of a call to a status code."""

    def __init__(self, authenticator: Authenticator, handler: ExecuteHandler) -> None:
        self._authenticator = authenticator
        self._handler = handler
        self._threads = anyio.CapacityLimiter(_MAX_CONCURRENT_CALLS)
        self._bodies = BodyBudget(MAX_BODY_BYTES, _MAX_TENANT_BYTES, _MAX_BYTES)

    async def execute(self, request: Request) -> Response:
        try:
            caller = await self._authenticator.authenticate(_bearer_token(request), _client_host(request))
        except UnauthenticatedError as error:
            _log.warning("call.forbidden", client=_client_host(request), path=request.url.path)
            return _error_response(403, str(error), CLOSE_CONNECTION)
        except StoreError as error:
            _log.error("call.unreviewed", error=str(error))
            return _error_response(503, f"the token cannot be verified now: {error}", CLOSE_CONNECTION)
        try:
            async with self._bodies.read_body(request, caller.namespace or "") as body:
                return await to_thread.run_sync(self._answer, request, caller, body, limiter=self._threads)
        except (BodyTooLargeError, BodyLengthError) as error:
            status = 413 if isinstance(error, BodyTooLargeError) else 411
            return _error_response(status, str(error), CLOSE_CONNECTION)
        except UsageError as error:
            return _error_response(400, str(error))
        except StoreError as error:
            return _error_response(503, str(error), CLOSE_CONNECTION)

    def _answer(self, request: Request, caller: Caller, body: bytes) -> Response:
        try:
            document = parse_json(body, max_values=_MAX_VALUES)
        except UsageError as error:
            return _error_response(400, str(error))
        if not isinstance(document, dict):
            return _error_response(400, "the body is not a JSON object")
        try:
            return JSONResponse(self._handler(caller, document).to_json())
        except ForbiddenNamespaceError as error:
            _log.warning("call.trespassed", client=_client_host(request), reason=str(error))
            return _error_response(403, str(error))
        except StoreError as error:
            return _error_response(503, str(error))
        except Exception as error:  # noqa: BLE001  the HTTP boundary
            # A bug of the plugin. 500 would fail the node at once. After 503 the call is repeated for a
            # while: a race may succeed then, and any other bug fails the node with this message.
            _log.exception("call.crashed")
            return _error_response(
                503, f"the plugin failed on this call ({type(error).__name__}); its log has the trace"
            )


def _bearer_token(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    # The framework decodes headers as Latin-1, and people type UTF-8.
    return token.encode("latin-1").decode(errors="replace") if scheme == "Bearer" else ""


def _client_host(request: Request) -> str:
    return request.client.host if request.client else ""


def _error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status_code=status, headers=headers)


__all__ = ["AppServer", "PluginServer"]


class PluginServer(AppServer):
    """HTTP server of one core without tenants, for callers that share one token.

    Raises:
        ConflictError: the port is in use.
        UsageError: the token is empty, or the host cannot be listened on.
    """

    def __init__(self, core: PluginCore, token: str, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(create_app(core, token), host, port)
