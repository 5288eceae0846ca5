"""Leader election by a Lease object (Kubernetes, ``client-go/tools/leaderelection``).

Clocks of different machines are never compared: a candidate measures with its
own clock how long the Lease has not changed. A leader that was paused does not
notice the pause. It therefore checks `LeaderElector.is_leader` before each
write, which compares its own clock with its last renewal, and loses leadership
earlier than other candidates may acquire it.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime

import structlog

from tiphys.errors import ConflictError, FencedError, NotFoundError, StoreError
from tiphys.kube.api import KubeApi, Object
from tiphys.kube.resources import LEASES

_log = structlog.get_logger()


@dataclass
class LeaderElector:
    """A candidate for the Lease of a name in a namespace."""

    api: KubeApi
    namespace: str
    name: str
    identity: str
    """Name of this candidate, unique among the candidates: the name of its pod."""
    _: KW_ONLY
    monotonic: Callable[[], float]
    """Seconds of a clock that never jumps and continues while the process is paused."""
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    """Wall clock, for the times in the Lease, which no candidate uses."""
    duration_seconds: float = 15.0
    """Other candidates acquire a Lease that has not changed for this long."""
    renew_seconds: float = 2.0
    """Time between two renewals."""
    _observed_version: tuple[str, float] = ("", 0.0)
    _renewed_at: float | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this candidate leads. Turns False a third of the duration before others can acquire the Lease."""
        renewed_at = self._renewed_at
        return renewed_at is not None and self.monotonic() - renewed_at < self.duration_seconds * 2 / 3

    def try_acquire_or_renew(self) -> bool:
        """Acquire or renew the Lease if possible; return `is_leader`. Call it every ``renew_seconds``."""
        started_at = self.monotonic()
        try:
            if self._acquire_or_renew(started_at):
                self._renewed_at = started_at
        except ConflictError:
            pass  # another candidate has just written the Lease; the next call reads it
        except (StoreError, NotFoundError) as error:
            _log.warning("leader.unreachable", lease=self.name, error=str(error))
        return self.is_leader

    def run(self, stop: threading.Event, on_started_leading: Callable[[threading.Event], object]) -> None:
        """Take part in the election until ``stop`` is set, and release the Lease then.

        ``on_started_leading`` runs in its own thread while this candidate leads. Its argument is set when it must end:
        leadership is lost, or ``stop`` is set. The Lease is renewed until it has ended.
        """
        while not stop.is_set():
            if self.try_acquire_or_renew():
                _log.info("leader.elected", lease=self.name, identity=self.identity)
                self._lead_until_lost(stop, on_started_leading)
                _log.info("leader.ended", lease=self.name, identity=self.identity)
            stop.wait(self.renew_seconds)
        self._release()

    def _lead_until_lost(self, stop: threading.Event, on_started_leading: Callable[[threading.Event], object]) -> None:
        must_stop = threading.Event()
        worker = threading.Thread(
            target=self._run_worker, args=(on_started_leading, must_stop), name=f"leader-{self.name}", daemon=True
        )
        worker.start()
        while worker.is_alive() and not stop.wait(self.renew_seconds):
            if not self.try_acquire_or_renew():
                break
        must_stop.set()
        while worker.is_alive():  # no other candidate may lead until its last writes are done
            worker.join(self.renew_seconds)
            if self.is_leader:
                self.try_acquire_or_renew()

    def _run_worker(self, on_started_leading: Callable[[threading.Event], object], must_stop: threading.Event) -> None:
        try:
            on_started_leading(must_stop)
        except Exception:  # noqa: BLE001  a worker loop: the error is logged, and the next renewal starts it again
            _log.exception("leader.failed", lease=self.name)

    def _acquire_or_renew(self, started_at: float) -> bool:
        lease = self.api.get(LEASES, self.namespace, self.name)
        if lease is None:
            self.api.create(LEASES, self.namespace, self._updated_lease({"metadata": {"name": self.name}}, 0))
            return True
        spec = lease.get("spec") or {}
        is_ours = spec.get("holderIdentity") == self.identity
        version = lease["metadata"]["resourceVersion"]
        if version != self._observed_version[0]:
            # Not `started_at`: the Lease may have been written while the request was under way.
            self._observed_version = (version, self.monotonic())
        duration_seconds = float(spec.get("leaseDurationSeconds") or self.duration_seconds)
        has_expired = started_at - self._observed_version[1] >= duration_seconds
        if not (is_ours or has_expired or not spec.get("holderIdentity")):
            self._renewed_at = None
            return False
        written = self.api.replace(LEASES, self.namespace, self._updated_lease(lease, 0 if is_ours else 1))
        self._observed_version = (written["metadata"]["resourceVersion"], started_at)
        return True

    def _updated_lease(self, lease: Object, transitions: int) -> Object:
        previous = lease.get("spec") or {}
        now = self.now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        acquired_at = now if transitions or "acquireTime" not in previous else previous["acquireTime"]
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": max(1, math.ceil(self.duration_seconds)),
            "acquireTime": acquired_at,
            "renewTime": now,
            "leaseTransitions": int(previous.get("leaseTransitions") or 0) + transitions,
        }
        return {**lease, "spec": spec}

    def _release(self) -> None:
        """Release the Lease, so that the next candidate need not wait until it expires."""
        if not self.is_leader:
            return
        self._renewed_at = None
        try:
            lease = self.api.get(LEASES, self.namespace, self.name)
            if lease and (lease.get("spec") or {}).get("holderIdentity") == self.identity:
                self.api.replace(LEASES, self.namespace, {**lease, "spec": {**lease["spec"], "holderIdentity": ""}})
        except (ConflictError, NotFoundError, StoreError) as error:
            _log.warning("leader.not_given_up", lease=self.name, error=str(error))


def require_leadership(is_leader: Callable[[], bool]) -> None:
    """Check right before a write that this process still leads.

    Raises:
        FencedError: another process may lead by now.
    """
    if not is_leader():
        raise FencedError("this controller lost the leader lease; the next leader continues from the same storage")
