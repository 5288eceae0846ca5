"""Authenticates callers by TokenReview: only the plugin's service account of a served namespace may call.

A review is an API request, and each plugin step makes many calls, so results are
cached. An accepted token is cached for 60 seconds, which is how long a deleted
account can still call. A refused one is cached for 5 seconds, so that a repaired
account works soon.
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

SERVICE_ACCOUNT = "tiphys-executor-plugin"
_USER = re.compile(rf"system:serviceaccount:([a-z0-9-]+):{SERVICE_ACCOUNT}")
_ACCEPTED_TTL_SECONDS, _REFUSED_TTL_SECONDS = 60.0, 5.0
_MAX_CACHED_REVIEWS = 2048
_log = structlog.get_logger()


class TokenReviewAuthenticator:
    """An `Authenticator` that verifies tokens with the API server.

    Args:
        api: The API server.
        serves: Whether a namespace is served.
        registry: Registry of the metric that counts reviews.
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
        self._cached_reviews: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        self._lock = threading.Lock()
        self._reviews = Counter(
            "tiphys_reviews",
            "Reviews of tokens by the API server, by result: accepted, refused, unavailable.",
            ("result",),
            registry=registry,
        )

    def authenticate(self, token: str) -> Caller:
        if not token:
            raise UnauthenticatedError("the call has no bearer token")
        key = hashlib.sha256(token.encode()).digest()
        namespace = self._cached_namespace(key)
        if namespace is None:
            namespace = self._review(token)
            self._cache_review(key, namespace)
        if not namespace:
            raise UnauthenticatedError(
                f"the bearer token is not that of a service account {SERVICE_ACCOUNT} in a namespace that this "
                "plugin serves; `tiphys doctor --cluster` examines the accounts"
            )
        return Caller(namespace)

    def _cached_namespace(self, key: bytes) -> str | None:
        with self._lock:
            until, namespace = self._cached_reviews.get(key, (0.0, ""))
        return namespace if self._monotonic() < until else None

    def _cache_review(self, key: bytes, namespace: str) -> None:
        until = self._monotonic() + (_ACCEPTED_TTL_SECONDS if namespace else _REFUSED_TTL_SECONDS)
        with self._lock:
            self._cached_reviews[key] = (until, namespace)
            self._cached_reviews.move_to_end(key)
            if len(self._cached_reviews) > _MAX_CACHED_REVIEWS:
                self._cached_reviews.popitem(last=False)

    def _review(self, token: str) -> str:
        """Namespace of the service account of the token; empty if the account may not call."""
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
