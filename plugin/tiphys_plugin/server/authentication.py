"""Authentication of callers, and the namespace that each may act for.

An interface, because a plugin on one machine has no API server to review tokens.
"""

import hmac
from typing import NamedTuple, Protocol

from tiphys.errors import TiphysError, UsageError


class UnauthenticatedError(TiphysError):
    """The token is missing, wrong, or of an account that may not call."""


class Caller(NamedTuple):
    """An authenticated caller; it may act for ``namespace``, or for all if that is None."""

    namespace: str | None


class Authenticator(Protocol):
    """Identifies callers by their bearer token."""

    async def authenticate(self, token: str, client: str) -> Caller:
        """Identify the caller with this token, before anything else is read of its request.

        ``token`` is empty for a call without one, and ``client`` is the address of the caller.

        Raises:
            UnauthenticatedError: the token is of no caller that is allowed.
            StoreError: the token cannot be verified now.
        """


class SharedTokenAuthenticator:
    """One shared token for all callers, which may act for any namespace: for the local engine.

    Raises:
        UsageError: the token is empty.
    """

    def __init__(self, token: str) -> None:
        if not token:
            raise UsageError("the plugin's token is empty, so any process could call it; set a random token")
        self._token = token.encode()

    async def authenticate(self, token: str, client: str) -> Caller:  # noqa: ARG002
        if not hmac.compare_digest(token.encode(), self._token):
            raise UnauthenticatedError(
                "the bearer token is missing or wrong; the plugin and its caller must share one token"
            )
        return Caller(None)
