"""Who calls? The API server says whose token it is, and only the plugin's own account of a namespace is let in.

A review is an API request, and each plugin step is many calls, so a verdict is
remembered for a short time: a good one for at most 60 seconds, which is how
long a deleted account can still call, a bad one for 5, in which it may be mended.
"""

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import structlog
from prometheus_client import CollectorRegistry, Counter

from tiphys.errors import StoreError
from tiphys.kube import KubeApi
from tiphys.kube.resources import TOKEN_REVIEWS
from tiphys_plugin.server.authentication import Caller, UnauthenticatedError

ACCOUNT = "tiphys-executor-plugin"
_USER = re.compile(rf"system:serviceaccount:([a-z0-9-]+):{ACCOUNT}")
_GOOD_SECONDS, _BAD_SECONDS = 60.0, 5.0
_MOST_VERDICTS = 2048
_log = structlog.get_logger()


class ReviewedTokens:
    """An `Authenticator` that asks the API server.

    Args:
        api: The API server.
        serves: Whether a namespace is served.
        registry: Where reviews are counted.
        monotonic: Seconds on a clock that never jumps.
    """

    def __init__(
        self,
        api: KubeApi,
        serves: Callable[[str], bool],
        registry: CollectorRegistry,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._serves = serves
        self._monotonic = monotonic
        self._verdicts: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        self._lock = threading.Lock()
        self._reviews = Counter(
            "tiphys_reviews",
            "Reviews of tokens by the API server, by result: accepted, refused, unavailable.",
            ("result",),
            registry=registry,
        )

    def caller(self, token: str) -> Caller:
        if not token:
            raise UnauthenticatedError("the call has no bearer token")
        key = hashlib.sha256(token.encode()).digest()
        namespace = self._known(key)
        if namespace is None:
            namespace = self._review(token)
            self._remember(key, namespace)
        if not namespace:
            raise UnauthenticatedError(
                f"the bearer token is not that of a service account {ACCOUNT} in a namespace that this plugin serves; "
                "`tiphys doctor --cluster` examines the accounts"
            )
        return Caller(namespace)

    def _known(self, key: bytes) -> str | None:
        with self._lock:
            until, namespace = self._verdicts.get(key, (0.0, ""))
        return namespace if self._monotonic() < until else None

    def _remember(self, key: bytes, namespace: str) -> None:
        until = self._monotonic() + (_GOOD_SECONDS if namespace else _BAD_SECONDS)
        with self._lock:
            self._verdicts[key] = (until, namespace)
            self._verdicts.move_to_end(key)
            if len(self._verdicts) > _MOST_VERDICTS:
                self._verdicts.popitem(last=False)

    def _review(self, token: str) -> str:
        """Namespace of the account that the token belongs to; empty if it may not call."""
        try:
            answer = self._api.create(TOKEN_REVIEWS, None, {"spec": {"token": token}})
        except StoreError:
            self._reviews.labels(result="unavailable").inc()
            raise
        status = answer.get("status") or {}
        user = str((status.get("user") or {}).get("username") or "")
        match = _USER.fullmatch(user) if status.get("authenticated") else None
        accepted = match is not None and self._serves(match[1])
        self._reviews.labels(result="accepted" if accepted else "refused").inc()
        if match is None or not accepted:
            _log.warning("token.refused", user=user, error=str(status.get("error") or ""))
            return ""
        return match[1]
