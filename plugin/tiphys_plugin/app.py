"""The service as Argo's agent sees it: HTTP around `PluginCore`.

What a status means to the agent decides which one is sent (Argo Workflows,
``workflow/util/plugin``): 503 is repeated, 404 switches the plugin off until
the agent restarts, and any other error fails the node at once, so neither of
the last two is ever an answer to a call that carries our token.
"""

import hmac
import json
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tiphys.errors import StoreError
from tiphys_plugin.core import PluginCore

EXECUTE_PATH = "/api/v1/template.execute"
_LARGEST_BODY_BYTES = 2 << 20
"""A task set, which holds the templates of a whole workflow, is one object of about 1.5 MB."""
_log = structlog.get_logger()


class _BodyTooLarge(Exception):  # noqa: N818  never leaves this module
    pass


def create_app(core: PluginCore, token: str) -> Starlette:
    """The ASGI application. ``token`` is what Argo sends as ``Authorization: Bearer``."""
    service = _Service(core, token)
    return Starlette(
        routes=[
            Route(EXECUTE_PATH, service.execute, methods=["POST"]),
            Route("/healthz", service.healthy),
            Route("/readyz", service.ready),
            Route("/metrics", service.metrics),
        ]
    )


class _Service:
    def __init__(self, core: PluginCore, token: str) -> None:
        self._core = core
        self._authorization = f"Bearer {token}".encode()

    async def execute(self, request: Request) -> Response:
        if not self._may_call(request):
            _log.warning("call.forbidden", client=request.client.host if request.client else "", path=request.url.path)
            return _error(403, "the bearer token is missing or wrong; the plugin and its caller must share one token")
        try:
            document = json.loads(await _body(request))
        except _BodyTooLarge:
            return _error(413, f"the body is larger than {_LARGEST_BODY_BYTES} bytes")
        except ValueError as error:
            return _error(400, f"the body is not JSON: {error}")
        if not isinstance(document, dict):
            return _error(400, "the body is not a JSON object")
        return await run_in_threadpool(self._answer, document)

    async def healthy(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(self, _: Request) -> Response:
        try:
            await run_in_threadpool(self._core.check)
        except StoreError as error:
            return _error(503, str(error))
        return PlainTextResponse("ok\n")

    async def metrics(self, _: Request) -> Response:
        text = await run_in_threadpool(self._core.metrics.render)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _may_call(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").encode()
        return hmac.compare_digest(given, self._authorization)

    def _answer(self, document: dict[str, Any]) -> Response:
        try:
            return JSONResponse(self._core.execute_document(document).to_json())
        except StoreError as error:
            return _error(503, str(error))
        except Exception as error:  # noqa: BLE001  the HTTP boundary
            # A bug of ours. 500 would fail the node at once; 503 has Argo ask again for a while, which
            # heals what was a race, and fails the node with this sentence if it was not.
            _log.exception("call.crashed")
            return _error(503, f"the plugin failed on this call ({type(error).__name__}); its log has the trace")


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LARGEST_BODY_BYTES:
            raise _BodyTooLarge
    return bytes(body)


def _error(status: int, sentence: str) -> Response:
    return JSONResponse({"error": sentence}, status_code=status)
