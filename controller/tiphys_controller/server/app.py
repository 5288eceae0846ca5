"""The controller's pages: health, readiness and metrics, and the calls behind the door."""

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


def create_app(check: Callable[[], None], render: Callable[[], bytes], calls: Sequence[Route] = ()) -> Starlette:
    """The application.

    Args:
        check: Raises an error of Tiphys that says why the controller is not ready.
        render: Metrics in the Prometheus text format.
        calls: Routes behind the door.
    """

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        try:
            await run_in_threadpool(check)
        except TiphysError as error:
            return Response(json.dumps({"error": str(error)}), 503, media_type="application/json")
        return PlainTextResponse("ok\n")

    async def metrics(_: Request) -> Response:
        return Response(await run_in_threadpool(render), media_type=_METRICS)

    async def nothing(_: Request) -> Response:
        more = "".join(f" {path}" for path in sorted({route.path for route in calls}))
        return PlainTextResponse(f"there are /healthz, /readyz and /metrics{more}\n", 404)

    pages = [Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)]
    return Starlette(routes=[*pages, *calls, Route("/{path:path}", nothing, methods=_METHODS)])
