"""The HTTP application of the controller: health, readiness, metrics, and the routes of the API."""

import json
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tiphys.errors import TiphysError

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


def create_controller_app(
    check_ready: Callable[[], None], render_metrics: Callable[[], bytes], api_routes: Sequence[Route] = ()
) -> Starlette:
    """Create the application.

    ``check_ready`` raises a `TiphysError` if the controller is not ready. ``api_routes`` are behind access control.
    """

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        try:
            await run_in_threadpool(check_ready)
        except TiphysError as error:
            return Response(json.dumps({"error": str(error)}), 503, media_type="application/json")
        return PlainTextResponse("ok\n")

    async def metrics(_: Request) -> Response:
        return Response(await run_in_threadpool(render_metrics), media_type=_METRICS)

    async def nothing(_: Request) -> Response:
        more = "".join(f" {path}" for path in sorted({route.path for route in api_routes}))
        return PlainTextResponse(f"there are /healthz, /readyz and /metrics{more}\n", 404)

    pages = [Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)]
    return Starlette(routes=[*pages, *api_routes, Route("/{path:path}", nothing, methods=_METHODS)])
