"""Who calls, and for which namespace may it speak? A seam, because a process on this machine has no cluster to ask."""

import hmac
from typing import NamedTuple, Protocol

from tiphys.errors import TiphysError, UsageError


class UnauthenticatedError(TiphysError):
    """The token is missing, wrong, or of somebody who may not call."""


class Caller(NamedTuple):
    """``namespace`` is the one that it speaks for; None where there are no tenants."""

    namespace: str | None


class Authenticator(Protocol):
    """Tells callers by their bearer token."""

    def caller(self, token: str) -> Caller:
        """Who has this token.

        Raises:
            UnauthenticatedError: nobody who may call.
            StoreError: whoever knows does not answer.
        """


class SharedToken:
    """One token for everybody: the embedded service. It may speak for any namespace."""

    def __init__(self, token: str) -> None:
        if not token:
            raise UsageError("the plugin's token is empty: anybody could call it; give a random one")
        self._token = token.encode()

    def caller(self, token: str) -> Caller:
        if not hmac.compare_digest(token.encode(), self._token):
            raise UnauthenticatedError(
                "the bearer token is missing or wrong; the plugin and its caller must share one token"
            )
        return Caller(None)
