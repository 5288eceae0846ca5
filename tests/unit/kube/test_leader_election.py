"""Who leads, on clocks that the test moves.

| the Lease | a candidate |
|---|---|
| is not there, or given up | takes it |
| is its own | renews it |
| changed since it last looked | waits a whole duration from now |
| has not changed for its duration | takes it over |
| cannot be read or written | leads for two thirds of the duration since its last renewal, then no more |
"""

import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from support.servers.kube_server import KubeServer, Request
from support.servers.kube_store import Collection, ObjectStore, Place, RefusedError
from urllib3 import PoolManager

from tiphys.errors import ConflictError, NotFoundError, ObjectExistsError, StoreError
from tiphys.kube import KubeApi, LeaderElector, Object, Resource
from tiphys.kube.resources import LEASES

_LONG = 60.0
_DURATION = 15.0


class Clock:
    def __init__(self, offset: float = 0.0) -> None:
        self.seconds = 1000.0 + offset

    def __call__(self) -> float:
        return self.seconds


def candidate(api: KubeApi, name: str, clock: Callable[[], float], **settings: float) -> LeaderElector:
    return LeaderElector(api, "ml", "tiphys-agent", name, monotonic=clock, **settings)


def spec(server: KubeServer) -> Object:
    [lease] = server.objects("leases")
    found: Object = lease["spec"]
    return found


def test_the_first_one_leads_and_says_since_when(api: KubeApi, server: KubeServer) -> None:
    moment = datetime(2030, 5, 6, 7, 8, 9, tzinfo=UTC)
    first = LeaderElector(api, "ml", "tiphys-agent", "one", monotonic=Clock(), now=lambda: moment)
    assert not first.is_leader
    assert first.try_acquire_or_renew()
    assert first.is_leader
    assert spec(server) == {
        "holderIdentity": "one",
        "leaseDurationSeconds": 15,
        "acquireTime": "2030-05-06T07:08:09.000000Z",
        "renewTime": "2030-05-06T07:08:09.000000Z",
        "leaseTransitions": 0,
    }


def test_a_renewed_lease_is_not_taken_over(api: KubeApi) -> None:
    clock, other_clock = Clock(), Clock(offset=5000.0)
    one, two = candidate(api, "one", clock), candidate(api, "two", other_clock)
    for _ in range(10):
        assert one.try_acquire_or_renew()
        assert not two.try_acquire_or_renew()
        clock.seconds += 9
        other_clock.seconds += 9


def test_a_lease_not_renewed_for_its_duration_is_taken_over(api: KubeApi, server: KubeServer) -> None:
    clock = Clock()
    one, two = candidate(api, "one", clock), candidate(api, "two", clock)
    one.try_acquire_or_renew()
    two.try_acquire_or_renew()
    clock.seconds += _DURATION - 0.1
    assert not two.try_acquire_or_renew()
    assert not one.is_leader
    clock.seconds += 0.1
    assert two.try_acquire_or_renew()
    assert (spec(server)["holderIdentity"], spec(server)["leaseTransitions"]) == ("two", 1)
    assert not one.try_acquire_or_renew()


def test_the_duration_counts_that_the_holder_has_written(api: KubeApi) -> None:
    clock = Clock()
    one, two = candidate(api, "one", clock, duration_seconds=60.0), candidate(api, "two", clock)
    one.try_acquire_or_renew()
    two.try_acquire_or_renew()
    clock.seconds += 59
    assert not two.try_acquire_or_renew()
    clock.seconds += 1
    assert two.try_acquire_or_renew()


def test_a_leader_that_was_paused_knows_it_before_its_next_write(api: KubeApi) -> None:
    clock = Clock()
    one = candidate(api, "one", clock)
    one.try_acquire_or_renew()
    clock.seconds += _DURATION * 2 / 3 - 0.1
    assert one.is_leader
    clock.seconds += 0.1
    assert not one.is_leader
    assert one.try_acquire_or_renew()  # nobody else was there


def test_a_leader_that_starts_again_under_its_name_goes_on(api: KubeApi, server: KubeServer) -> None:
    candidate(api, "one", Clock()).try_acquire_or_renew()
    assert candidate(api, "one", Clock()).try_acquire_or_renew()
    assert spec(server)["leaseTransitions"] == 0


def test_a_leader_without_api_server_leads_until_its_time_is_over(api: KubeApi, server: KubeServer) -> None:
    clock = Clock()
    one = candidate(api, "one", clock)
    one.try_acquire_or_renew()
    server.pause()
    clock.seconds += 9
    assert one.try_acquire_or_renew()
    clock.seconds += 2
    assert not one.try_acquire_or_renew()
    server.resume()
    assert one.try_acquire_or_renew()


def test_a_renewal_whose_answer_is_lost_costs_nothing(api: KubeApi, server: KubeServer) -> None:
    clock = Clock()
    one = candidate(api, "one", clock)
    one.try_acquire_or_renew()
    server.fail_next(0, verb="update", done=True)
    clock.seconds += 2
    assert one.try_acquire_or_renew()
    clock.seconds += 7
    assert one.try_acquire_or_renew()


def test_a_takeover_whose_answer_is_lost_is_found_at_the_next_look(api: KubeApi, server: KubeServer) -> None:
    server.fail_next(0, verb="create", done=True)
    one = candidate(api, "one", Clock())
    assert not one.try_acquire_or_renew()
    assert one.try_acquire_or_renew()
    assert spec(server)["holderIdentity"] == "one"


def test_a_conflict_on_the_lease_does_not_end_a_leadership(api: KubeApi, server: KubeServer) -> None:
    one = candidate(api, "one", Clock())
    one.try_acquire_or_renew()
    server.fail_next(409, verb="update")
    assert one.try_acquire_or_renew()


@pytest.mark.parametrize("status", [403, 404, 429, 500])
def test_a_refusal_is_no_leadership(api: KubeApi, server: KubeServer, status: int) -> None:
    one = candidate(api, "one", Clock())
    server.fail_next(status, verb="create")
    assert not one.try_acquire_or_renew()
    assert one.try_acquire_or_renew()


def test_candidates_that_find_no_lease_at_once_do_not_both_lead(api: KubeApi, server: KubeServer) -> None:
    two = candidate(server.api("ml"), "two", Clock())
    done: list[bool] = []

    def overtake(request: Request) -> bool:
        if request.verb == "create" and not done:
            done.append(True)
            done.append(two.try_acquire_or_renew())
        return True

    server.authorize = overtake
    one = candidate(api, "one", Clock())
    assert not one.try_acquire_or_renew()
    assert done == [True, True]


def test_the_work_of_a_leader_ends_with_stop_and_the_next_one_is_let_in(api: KubeApi, server: KubeServer) -> None:
    stop, started = threading.Event(), threading.Event()
    at_the_end: list[str] = []

    def work(over: threading.Event) -> None:
        started.set()
        over.wait(_LONG)
        at_the_end.append(spec(server)["holderIdentity"])

    one = candidate(api, "one", Clock(), renew_seconds=0.01)
    thread = threading.Thread(target=one.run, args=(stop, work))
    thread.start()
    assert started.wait(_LONG)
    stop.set()
    thread.join(_LONG)
    assert at_the_end == ["one"]  # given up after the work, not before
    assert not one.is_leader
    assert candidate(api, "two", Clock()).try_acquire_or_renew()


def test_the_work_ends_when_the_lease_is_lost_and_begins_anew_when_it_is_back(api: KubeApi, server: KubeServer) -> None:
    stop, clock = threading.Event(), Clock()
    begun, ended = threading.Semaphore(0), threading.Semaphore(0)

    def work(over: threading.Event) -> None:
        begun.release()
        over.wait(_LONG)
        ended.release()

    one = candidate(api, "one", clock, renew_seconds=0.01)
    thread = threading.Thread(target=one.run, args=(stop, work))
    thread.start()
    assert begun.acquire(timeout=_LONG)
    server.pause()
    clock.seconds += _DURATION
    assert ended.acquire(timeout=_LONG)
    server.resume()
    assert begun.acquire(timeout=_LONG)
    stop.set()
    thread.join(_LONG)
    assert ended.acquire(timeout=_LONG)


def test_work_that_fails_is_begun_again(api: KubeApi) -> None:
    stop, again = threading.Event(), threading.Event()
    calls: list[int] = []

    def work(over: threading.Event) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("a bug of the work")
        again.set()
        over.wait(_LONG)

    thread = threading.Thread(target=candidate(api, "one", Clock(), renew_seconds=0.01).run, args=(stop, work))
    thread.start()
    assert again.wait(_LONG)
    stop.set()
    thread.join(_LONG)
    assert not thread.is_alive()


def test_a_stop_ends_also_a_candidate_that_never_led_or_cannot_give_up(api: KubeApi, server: KubeServer) -> None:
    stop, started = threading.Event(), threading.Event()
    candidate(api, "two", Clock()).try_acquire_or_renew()
    waiting = threading.Thread(target=candidate(api, "one", Clock(), renew_seconds=0.01).run, args=(stop, print))
    waiting.start()
    leading = threading.Thread(
        target=candidate(api, "two", Clock(), renew_seconds=0.01).run, args=(stop, lambda _: started.set())
    )
    leading.start()
    assert started.wait(_LONG)
    server.pause()
    stop.set()
    for thread in (waiting, leading):
        thread.join(_LONG)
        assert not thread.is_alive()


class Simulation:
    """Candidates on one true time, each with an offset of its own, over a network that delays and loses.

    While a message is on its way time passes, and others act. At every moment
    nobody but one may lead; and whoever writes the Lease, nobody else leads.
    """

    def __init__(self, seed: int, kind: type[LeaderElector]) -> None:
        self.random = random.Random(seed)
        self.seconds = 0.0
        self.store = ObjectStore(set())
        self.busy: list[str] = []
        self.takeovers = 0
        self.candidates: dict[str, LeaderElector] = {}
        for index, offset in enumerate((0.0, -500.0, 1e6)):
            name = f"candidate-{index}"
            clock = lambda offset=offset: self.seconds + offset  # noqa: E731  each has its own
            self.candidates[name] = kind(Wire(self, name), "ml", "lease", name, monotonic=clock)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.someone_acts()
            self.time_passes()

    def someone_acts(self) -> None:
        name = self.random.choice(sorted(set(self.candidates) - set(self.busy)))
        self.busy.append(name)
        self.candidates[name].try_acquire_or_renew()
        self.busy.remove(name)
        self.check()

    def time_passes(self) -> None:
        self.seconds += self.random.choice((0.0, 0.01, 0.3, 2.0, 2.0, 6.0, 25.0))
        self.check()

    def on_the_way(self) -> None:
        self.time_passes()
        while len(self.busy) < len(self.candidates) and self.random.random() < 0.3:
            self.someone_acts()
            self.time_passes()

    def check(self, writer: str = "") -> None:
        leaders = [name for name, one in self.candidates.items() if one.is_leader and name != writer]
        assert len(leaders) <= (0 if writer else 1), f"{leaders} lead, while {writer or 'nobody'} writes"


class Wire(KubeApi):
    """One candidate's way to the Lease."""

    def __init__(self, world: Simulation, name: str) -> None:
        super().__init__("http://simulated", PoolManager(), "ml")
        self._world = world
        self._name = name

    def _carry(self, act: Callable[[], Object]) -> Object:
        self._world.on_the_way()
        if self._world.random.random() < 0.1:
            raise StoreError("lost on the way there")
        try:
            answer = act()
        except RefusedError as refused:
            kinds = {404: NotFoundError, 409: ObjectExistsError if refused.reason == "AlreadyExists" else ConflictError}
            raise kinds[refused.status](refused.message) from refused
        finally:
            self._world.on_the_way()
        if self._world.random.random() < 0.1:
            raise StoreError("lost on the way back")
        return answer

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        try:
            return self._carry(lambda: self._world.store.get(_PLACE))
        except NotFoundError:
            return None

    def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        return self._carry(lambda: self._written(self._world.store.create(_PLACE.collection, "ml", body)))

    def replace(self, resource: Resource, namespace: str | None, body: Object, subresource: str = "") -> Object:
        return self._carry(lambda: self._written(self._world.store.write(_PLACE, "", lambda _: body)))

    def _written(self, lease: Object) -> Object:
        self._world.takeovers = lease["spec"]["leaseTransitions"]
        self._world.check(writer=self._name)
        return lease


_PLACE = Place(Collection(LEASES.group, LEASES.plural), "ml", "lease")


@pytest.mark.parametrize("seed", range(30))
def test_at_every_moment_of_a_random_schedule_at_most_one_leads(seed: int) -> None:
    world = Simulation(seed, LeaderElector)
    world.run(steps=60)
    assert world.takeovers > 0  # the schedule has tried it


class Unaware(LeaderElector):
    """Believes that it leads until it is told otherwise, as a paused leader would."""

    @property
    def is_leader(self) -> bool:
        return self._renewed_at is not None


class Hasty(LeaderElector):
    """Counts from the moment it asked, not from the moment it was answered."""

    def _acquire_or_renew(self, asked_at: float) -> bool:
        clock, self.monotonic = self.monotonic, lambda: asked_at
        try:
            return super()._acquire_or_renew(asked_at)
        finally:
            self.monotonic = clock


@pytest.mark.parametrize("kind", [Unaware, Hasty])
def test_the_simulation_finds_two_leaders_where_there_can_be_two(kind: type[Any]) -> None:
    with pytest.raises(AssertionError, match="lead, while"):
        for seed in range(300):
            Simulation(seed, kind).run(steps=60)
