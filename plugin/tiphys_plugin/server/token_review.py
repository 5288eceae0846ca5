"""Authenticates callers by TokenReview: only the plugin's service account of a served namespace may call.

A review is an API request, and each plugin step makes many calls, so results are
cached. An accepted token is cached for 60 seconds, which is how long a deleted
account can still call. A refused one is cached for 5 seconds, so that a repaired
account works soon.

Any pod of the cluster can send tokens that are in no cache. So reviews have
threads of their own, and their number is limited, in all and for each client.
Refused tokens cannot displace accepted ones from the cache, and a token that was
accepted before is not reviewed behind unknown ones.
"""

import asyncio
import hashlib
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import prometheus_client
import structlog
from cachetools import LRUCache, TTLCache
from prometheus_client import CollectorRegistry

from tiphys.errors import StoreError
from tiphys.kube import KubeApi
from tiphys.kube.resources import TOKEN_REVIEWS
from tiphys_plugin.server.authentication import Caller, UnauthenticatedError

SERVICE_ACCOUNT = "tiphys-executor-plugin"
_USER = re.compile(rf"system:serviceaccount:([a-z0-9-]+):{SERVICE_ACCOUNT}")
_ACCEPTED_TTL_SECONDS, _REFUSED_TTL_SECONDS = 60.0, 5.0
_MAX_CACHED_REVIEWS = 2048
"""Accepted tokens, and as many refused ones."""
_REVIEW_THREADS, _RENEWAL_THREADS = 6, 2
_MAX_OPEN_REVIEWS, _MAX_OPEN_REVIEWS_PER_CLIENT = 64, 4
"""Reviews of unknown tokens that run or wait. Calls with one token share a review, so a sidecar needs one at a time."""
_log = structlog.get_logger()


class TokenReviewAuthenticator:
    """An `Authenticator` that verifies tokens with the API server. It belongs to one event loop.

    ``audience`` is that for which a token must have been issued; empty for that of the API server.
    """

    def __init__(
        self,
        api: KubeApi,
        serves: Callable[[str], bool],
        registry: CollectorRegistry,
        audience: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._serves = serves
        self._audience = audience
        self._monotonic = monotonic
        self._accepted: LRUCache[bytes, tuple[float, str]] = LRUCache(_MAX_CACHED_REVIEWS)
        """When a token was accepted, and its namespace, by its hash. It is kept when it is old: a known caller's review
        waits behind no unknown ones."""
        self._refused: TTLCache[bytes, bool] = TTLCache(_MAX_CACHED_REVIEWS, _REFUSED_TTL_SECONDS, timer=monotonic)
        self._open_reviews: dict[bytes, asyncio.Future[str]] = {}
        self._open_by_client: Counter[str] = Counter()
        self._reviewers = ThreadPoolExecutor(_REVIEW_THREADS, "tiphys-review")
        self._renewers = ThreadPoolExecutor(_RENEWAL_THREADS, "tiphys-renewal")
        self._reviews = prometheus_client.Counter(
            "tiphys_reviews",
            "Reviews of tokens by the API server, by result: accepted, refused, unavailable; or put_off: too many.",
            ("result",),
            registry=registry,
        )

    async def authenticate(self, token: str, client: str) -> Caller:
        if not token:
            raise UnauthenticatedError("the call has no bearer token")
        key = hashlib.sha256(token.encode()).digest()
        accepted_at, namespace = self._accepted.get(key, (-math.inf, ""))
        if self._monotonic() - accepted_at >= _ACCEPTED_TTL_SECONDS:
            namespace = "" if self._refused.get(key) else await self._join_review(key, token, client)
        if not namespace:
            raise UnauthenticatedError(
                f"the bearer token is not that of a service account {SERVICE_ACCOUNT} in a namespace that this "
                "plugin serves; `tiphys doctor --cluster` examines the accounts"
            )
        return Caller(namespace)

    def close(self) -> None:
        """End the threads once their reviews have ended."""
        self._reviewers.shutdown(wait=False, cancel_futures=True)
        self._renewers.shutdown(wait=False, cancel_futures=True)

    async def _join_review(self, key: bytes, token: str, client: str) -> str:
        """Namespace of a token by the review of it that is open, or by a new one; empty if it is refused."""
        review = self._open_reviews.get(key)
        if review is None:
            review = self._begin_review(key, token, client)
        return await asyncio.shield(review)

    def _begin_review(self, key: bytes, token: str, client: str) -> asyncio.Future[str]:
        loop = asyncio.get_running_loop()
        if is_renewal := key in self._accepted:
            review = loop.run_in_executor(self._renewers, self._review, token)
        else:
            if (
                self._open_by_client.total() >= _MAX_OPEN_REVIEWS
                or self._open_by_client[client] >= _MAX_OPEN_REVIEWS_PER_CLIENT
            ):
                self._reviews.labels(result="put_off").inc()
                raise StoreError("too many unknown tokens wait for a review; call again")
            self._open_by_client[client] += 1
            review = loop.run_in_executor(self._reviewers, self._review, token)

        def end(done: asyncio.Future[str]) -> None:
            del self._open_reviews[key]
            if not is_renewal:
                self._open_by_client[client] -= 1
                self._open_by_client += Counter()  # drops clients without a review
            if not done.cancelled() and done.exception() is None:
                self._keep(key, done.result())

        self._open_reviews[key] = review
        review.add_done_callback(end)
        return review

    def _keep(self, key: bytes, namespace: str) -> None:
        if namespace:
            self._accepted[key] = self._monotonic(), namespace
        else:
            self._accepted.pop(key, None)
            self._refused[key] = True

    def _review(self, token: str) -> str:
        """Namespace of the service account of the token; empty if the account may not call."""
        try:
            spec = {"token": token, **({"audiences": [self._audience]} if self._audience else {})}
            answer = self._api.create(TOKEN_REVIEWS, None, {"spec": spec})
        except StoreError:
            self._reviews.labels(result="unavailable").inc()
            raise
        status = answer.get("status") or {}
        user = str((status.get("user") or {}).get("username") or "")
        # An API server that does not know audiences returns none (Kubernetes, TokenReviewSpec.audiences).
        is_meant = not self._audience or self._audience in (status.get("audiences") or ())
        match = _USER.fullmatch(user) if status.get("authenticated") and is_meant else None
        accepted = match is not None and self._serves(match[1])
        self._reviews.labels(result="accepted" if accepted else "refused").inc()
        if match is None or not accepted:
            _log.warning("token.refused", user=user, error=str(status.get("error") or ""))
            return ""
        return match[1]
