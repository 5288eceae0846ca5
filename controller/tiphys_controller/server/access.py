"""Access control of the HTTP API: token, rate limit and body size, in this order.

They are checked before a call is parsed. A refused call is logged and changes nothing.
A caller without the token takes nothing of the rate limit, and its body is not read.
"""

import base64
import binascii
import hmac
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, StoreError, TiphysError, UsageError
from tiphys.service.http_server import (
    CLOSE_CONNECTION,
    BodyBudget,
    BodyIncompleteError,
    BodyLengthError,
    BodyTooLargeError,
)
from tiphys_controller.auto_resume.observation_health import TokenBucket

MAX_BODY_BYTES = 2 << 20
_CALLS_PER_SECOND, _BURST = 50.0, 500
_STATUS = {UsageError: 400, NotFoundError: 404, ConflictError: 409, IntegrityError: 422, StoreError: 503}
_log = structlog.get_logger()

CallHandler = Callable[[Request, bytes], Response]
"""Answers an authorized call. Runs in a thread of its own; raises `TiphysError`."""
CallObserver = Callable[[str, int, float], None]
"""Called after each call, with its name, status and duration in seconds."""


@dataclass
class AccessControl:
    """Authorizes callers with the token, as ``Bearer`` or as the password of ``Basic``."""

    token_file: Path
    """File that holds the token; read at each call, so that it can be rotated."""
    observe_call: CallObserver
    monotonic: Callable[[], float] = time.monotonic
    burst: int = _BURST
    """Largest number of calls at once after a quiet time."""

    def guard(
        self, name: str, handler: CallHandler, max_body_bytes: int = MAX_BODY_BYTES
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return ``handler`` behind access control, with a rate of its own.

        ``name`` is that of the call in logs and metrics. Who writes objects chooses how many storage events come, and
        must not keep alerts from their answer.
        """
        bodies = BodyBudget(max_body_bytes, 2 * max_body_bytes, 2 * max_body_bytes)
        bucket = TokenBucket(_CALLS_PER_SECOND, self.burst, self.monotonic, starts_full=True)

        async def answer(request: Request) -> Response:
            begin = self.monotonic()
            response = await self._answer(name, handler, request, bucket, bodies)
            self.observe_call(name, response.status_code, self.monotonic() - begin)
            return response

        return answer

    async def _answer(
        self, name: str, handler: CallHandler, request: Request, bucket: TokenBucket, bodies: BodyBudget
    ) -> Response:
        if (refusal := self._check_credentials(request)) is not None:
            status, why = refusal
            headers = {"WWW-Authenticate": 'Bearer realm="tiphys"', **CLOSE_CONNECTION}
            return self._refuse(name, request, status, why, headers)
        if wait := bucket.take():
            headers = {"Retry-After": str(math.ceil(wait)), **CLOSE_CONNECTION}
            return self._refuse(name, request, 429, "too many calls", headers)
        try:
            async with bodies.read_body(request, name) as body:
                return await run_in_threadpool(self._run_handler, name, handler, request, body)
        except (BodyTooLargeError, BodyLengthError) as error:
            status = 413 if isinstance(error, BodyTooLargeError) else 411
            return self._refuse(name, request, status, str(error), CLOSE_CONNECTION)
        except BodyIncompleteError as error:
            return self._refuse(name, request, 400, str(error))
        except StoreError as error:
            return self._refuse(name, request, 503, str(error), CLOSE_CONNECTION)

    def _check_credentials(self, request: Request) -> tuple[int, str] | None:
        """Status and reason of a refusal; None if the caller is authorized.

        It reads the file in the event loop, because the threads may all be busy; the file is in memory (a Secret).
        """
        try:
            expected = self.token_file.read_bytes().strip()
        except OSError as error:
            return (
                503,
                f"the controller cannot read its token file ({error.strerror}); no call is authorized until it can",
            )
        if not expected:
            return 503, "the controller's token file is empty; no call is authorized until it holds a token"
        credential = _read_credential(request.headers.get("authorization", ""))
        return None if hmac.compare_digest(credential, expected) else (401, "the token is missing or wrong")

    def _run_handler(self, name: str, handler: CallHandler, request: Request, body: bytes) -> Response:
        try:
            response = handler(request, body)
        except TiphysError as error:
            status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
            return self._refuse(name, request, status, str(error))
        except Exception:  # noqa: BLE001  the HTTP boundary
            _log.exception("call.crashed", call=name, path=request.url.path)
            return self._refuse(name, request, 500, "internal error of the controller; its log has the traceback")
        _log.info("call.answered", call=name, status=response.status_code, **_log_fields(request))
        return response

    def _refuse(
        self, name: str, request: Request, status: int, why: str, headers: dict[str, str] | None = None
    ) -> Response:
        _log.warning("call.refused", call=name, status=status, reason=why, **_log_fields(request))
        return JSONResponse({"error": why}, status_code=status, headers=headers)


def _read_credential(header: str) -> bytes:
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1")  # the bytes of the header, see ASGI
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


def _log_fields(request: Request) -> dict[str, str]:
    return {"path": request.url.path[:200], "client": request.client.host if request.client else ""}
