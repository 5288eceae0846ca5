"""One leader at a time, by a Lease object (Kubernetes, ``client-go/tools/leaderelection``).

Clocks of different machines are never compared: a candidate measures on its own
clock how long the record has not changed. A leader that was paused cannot know
it; so it asks `held` right before each write, which compares its own clock with
its last renewal, and steps down earlier than others may take over.
"""

import math
import threading
from collections.abc import Callable
from datetime import UTC, datetime

import structlog

from tiphys.errors import ConflictError, NotFoundError, StoreError
from tiphys.kube.api import KubeApi, Object
from tiphys.kube.resources import LEASES

_log = structlog.get_logger()


class LeaderLease:
    """A candidate for one Lease.

    Args:
        api: The API server.
        namespace: Namespace of the Lease.
        name: Name of the Lease.
        identity: Name of this candidate; the pod's name, unique among the candidates.
        monotonic: Seconds on a clock that never jumps and goes on while the process is paused.
        now: Time of day, for the people who read the record.
        duration_seconds: Others take over when the record has not changed for this long.
        renew_seconds: Time between two renewals.
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        name: str,
        identity: str,
        *,
        monotonic: Callable[[], float],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        duration_seconds: float = 15.0,
        renew_seconds: float = 2.0,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._monotonic = monotonic
        self._now = now
        self._duration = duration_seconds
        self._renew = renew_seconds
        self._seen: tuple[str, float] = ("", 0.0)
        self._renewed_at: float | None = None

    @property
    def held(self) -> bool:
        """Whether this candidate certainly leads at this moment; False a third of the duration before others may."""
        renewed = self._renewed_at
        return renewed is not None and self._monotonic() - renewed < self._duration * 2 / 3

    def contend(self) -> bool:
        """Take or renew the Lease if that is possible now; whether it is held. Call it every `renew_seconds`."""
        asked_at = self._monotonic()
        try:
            if self._take(asked_at):
                self._renewed_at = asked_at
        except ConflictError:
            pass  # somebody else has written it in this moment; the next look tells who
        except (StoreError, NotFoundError) as error:
            _log.warning("leader.unreachable", lease=self._name, error=str(error))
        return self.held

    def lead(self, stop: threading.Event, started: Callable[[threading.Event], object]) -> None:
        """Contend until ``stop``; while this candidate leads, ``started`` runs in a thread of its own.

        Its argument is set when it has to end, because another may lead or
        ``stop`` was set. The Lease is given up only after it has ended.
        """
        while not stop.is_set():
            if self.contend():
                _log.info("leader.elected", lease=self._name, identity=self._identity)
                self._lead_once(stop, started)
                _log.info("leader.ended", lease=self._name, identity=self._identity)
            stop.wait(self._renew)
        self._give_up()

    def _lead_once(self, stop: threading.Event, started: Callable[[threading.Event], object]) -> None:
        over = threading.Event()
        worker = threading.Thread(target=self._work, args=(started, over), name=f"leader-{self._name}", daemon=True)
        worker.start()
        while worker.is_alive() and not stop.wait(self._renew):
            if not self.contend():
                break
        over.set()
        while worker.is_alive():  # while its last writes go on, nobody else may lead
            worker.join(self._renew)
            if self.held:
                self.contend()

    def _work(self, started: Callable[[threading.Event], object], over: threading.Event) -> None:
        try:
            started(over)
        except Exception:  # noqa: BLE001  a worker loop: what fails is told, and begun again with the next renewal
            _log.exception("leader.failed", lease=self._name)

    def _take(self, asked_at: float) -> bool:
        found = self._api.get(LEASES, self._namespace, self._name)
        if found is None:
            self._api.create(LEASES, self._namespace, self._record({"metadata": {"name": self._name}}, 0))
            return True
        spec = found.get("spec") or {}
        ours = spec.get("holderIdentity") == self._identity
        version = found["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = (version, self._monotonic())  # it may have been written while the answer was on its way
        expired = asked_at - self._seen[1] >= float(spec.get("leaseDurationSeconds") or self._duration)
        if not (ours or expired or not spec.get("holderIdentity")):
            self._renewed_at = None
            return False
        written = self._api.replace(LEASES, self._namespace, self._record(found, 0 if ours else 1))
        self._seen = (written["metadata"]["resourceVersion"], asked_at)
        return True

    def _record(self, found: Object, transitions: int) -> Object:
        before = found.get("spec") or {}
        moment = self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        taken_at = moment if transitions or "acquireTime" not in before else before["acquireTime"]
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, math.ceil(self._duration)),
            "acquireTime": taken_at,
            "renewTime": moment,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + transitions,
        }
        return {**found, "spec": spec}

    def _give_up(self) -> None:
        """Let the next one in at once instead of after the whole duration."""
        if not self.held:
            return
        self._renewed_at = None
        try:
            found = self._api.get(LEASES, self._namespace, self._name)
            if found and (found.get("spec") or {}).get("holderIdentity") == self._identity:
                self._api.replace(LEASES, self._namespace, {**found, "spec": {**found["spec"], "holderIdentity": ""}})
        except (ConflictError, NotFoundError, StoreError) as error:
            _log.warning("leader.not_given_up", lease=self._name, error=str(error))
