"""Who may call, how often and with how much: asked before anything of a call is looked at.

Each call that is refused leaves a line in the log and changes nothing.
"""

import base64
import binascii
import hmac
import json
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, StoreError, TiphysError, UsageError
from tiphys.service.http_server import BodyTooLargeError, read_body
from tiphys_controller.auto_resume.observation_health import TokenBucket

LARGEST_BODY_BYTES = 2 << 20
_CALLS_PER_SECOND, _BURST = 50.0, 500
_STATUS = {UsageError: 400, NotFoundError: 404, ConflictError: 409, IntegrityError: 422, StoreError: 503}
_log = structlog.get_logger()

Work = Callable[[Request, bytes], Response]
"""Answers a call that was let in. Runs in a thread of its own; raises errors of Tiphys."""
Count = Callable[[str, int, float], None]
"""Told of each call: what was called, the status, and the seconds that it took."""


class Door:
    """Lets callers in that have the token, as ``Bearer`` or as the password of ``Basic``.

    Args:
        token: File that holds it; read at each call, so that it can be exchanged while this runs.
        count: Told of each call.
        monotonic: A clock in seconds that never jumps.
        burst: So many calls at once are let in after a quiet time.
    """

    def __init__(
        self, token: Path, count: Count, monotonic: Callable[[], float] = time.monotonic, burst: int = _BURST
    ) -> None:
        self._token = token
        self._count = count
        self._monotonic = monotonic
        self._bucket = TokenBucket(_CALLS_PER_SECOND, burst, monotonic, full=True)

    def guard(self, name: str, work: Work) -> Callable[[Request], Awaitable[Response]]:
        """``work`` behind this door. ``name`` is that of the call in logs and metrics."""

        async def answer(request: Request) -> Response:
            begin = self._monotonic()
            response = await self._answer(name, work, request)
            self._count(name, response.status_code, self._monotonic() - begin)
            return response

        return answer

    async def _answer(self, name: str, work: Work, request: Request) -> Response:
        if wait := self._bucket.take():
            return self._refused(name, request, 429, "too many calls", {"Retry-After": str(math.ceil(wait))})
        if (refusal := await run_in_threadpool(self._unknown, request)) is not None:
            status, why = refusal
            return self._refused(name, request, status, why, {"WWW-Authenticate": 'Bearer realm="tiphys"'})
        try:
            body = await read_body(request, LARGEST_BODY_BYTES)
        except BodyTooLargeError as error:
            return self._refused(name, request, 413, str(error))
        return await run_in_threadpool(self._worked, name, work, request, body)

    def _unknown(self, request: Request) -> tuple[int, str] | None:
        """Why the caller is not let in; None if it is."""
        try:
            expected = self._token.read_bytes().strip()
        except OSError as error:
            return 503, f"the token cannot be read ({error.strerror}), so nobody can be let in"
        if not expected:
            return 503, "the token is empty, so nobody can be let in"
        given = _credential(request.headers.get("authorization", ""))
        return None if hmac.compare_digest(given, expected) else (401, "the token is missing or wrong")

    def _worked(self, name: str, work: Work, request: Request, body: bytes) -> Response:
        try:
            response = work(request, body)
        except TiphysError as error:
            status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
            return self._refused(name, request, status, str(error))
        except Exception:  # noqa: BLE001  the HTTP boundary
            _log.exception("call.crashed", call=name, path=request.url.path)
            return self._refused(name, request, 500, "a bug of the controller; its log has the trace")
        _log.info("call.answered", call=name, status=response.status_code, **_about(request))
        return response

    def _refused(
        self, name: str, request: Request, status: int, why: str, headers: dict[str, str] | None = None
    ) -> Response:
        _log.warning("call.refused", call=name, status=status, reason=why, **_about(request))
        return JSONResponse({"error": why}, status_code=status, headers=headers)


def json_body(body: bytes) -> Any:
    """The document that a caller sent.

    Raises:
        UsageError: it is no JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not JSON: {error}") from error


def _credential(header: str) -> bytes:
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode()
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


def _about(request: Request) -> dict[str, str]:
    return {"path": request.url.path[:200], "client": request.client.host if request.client else ""}
