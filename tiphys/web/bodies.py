"""Reads what a caller sends, up to a limit: nobody can fill the memory of a service."""

from starlette.requests import Request

from tiphys.errors import UsageError


class BodyTooLargeError(UsageError):
    """A caller sends more than it may."""


async def read_body(request: Request, largest_bytes: int) -> bytes:
    """The body of a request.

    Raises:
        BodyTooLargeError: it is larger; what was announced is not even read.
    """
    refusal = BodyTooLargeError(f"the body is larger than {largest_bytes} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > largest_bytes:
        raise refusal
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > largest_bytes:
            raise refusal
    return bytes(body)
