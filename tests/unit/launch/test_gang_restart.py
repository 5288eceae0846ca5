"""Members of a gang start their programs again together, or none does: the protocol of their launchers, in all orders.

Launchers run one at a time and hand over at each call of the store and at each wait, in a drawn order, on one clock.

| law | |
|---|---|
| no program is started while a process of the incarnation before is left in any member | `started` |
| all members that answer start the same incarnation, after the same end, or none does | `answers` |
| none is started before its gang has committed, or where a member failed for a reason of its own | `forbids` |
| every launcher comes to an end, whatever the store loses | `Stage.run` |
"""

import random
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.fakes.memory_store import MemoryStore

from tiphys.errors import StoreError
from tiphys.launch import rendezvous
from tiphys.launch.gang_restart import READY_SECONDS, GangMember, GangRestart, may_follow
from tiphys.launch.restart import ProgramEnd
from tiphys.launch.session_registry import NEEDS_NEW_POD
from tiphys.protocol import environment
from tiphys.records import Cause, GangRestartDecision, GangRestartRequest, utc_now
from tiphys.store import ObjectInfo, RunLayout
from tiphys.store.incarnations import joined_members_prefix

ALLOWED = ["hang", "infrastructure", "unknown"]
MOST_TURNS = 100_000


class Stage:
    """Lets threads run one at a time, in a drawn order."""

    def __init__(self, seed: int) -> None:
        self.random, self.now = random.Random(seed), 0.0
        self._turns: dict[int, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self._number = threading.local()

    def hand_over(self) -> None:
        self._back.release()
        self._turns[self._number.value].acquire()

    def run(self, plays: list["Launcher"]) -> None:
        def act(number: int, play: "Launcher") -> None:
            self._number.value = number
            self._turns[number].acquire()
            try:
                play.act()
            except BaseException as error:  # noqa: BLE001  the test shows it
                play.error = error
            play.is_over = True
            self._back.release()

        self._turns = {number: threading.Semaphore(0) for number in range(len(plays))}
        for number, play in enumerate(plays):
            threading.Thread(target=act, args=(number, play), daemon=True).start()
        for _ in range(MOST_TURNS):
            if not (waiting := [number for number, play in enumerate(plays) if not play.is_over]):
                break
            self._turns[self.random.choice(waiting)].release()
            self._back.acquire()
        errors = [play.error for play in plays if play.error]
        assert not errors, errors
        assert all(play.is_over for play in plays), "a launcher waits for ever"


class Signals:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.is_stop_requested = False

    def wait_next(self, seconds: float) -> None:
        self._stage.now += seconds / 4
        self._stage.hand_over()


class LosingStore(MemoryStore):
    """Loses requests and replies, and lets the others run before each of its calls."""

    def __init__(self, stage: Stage, losses: float) -> None:
        super().__init__()
        self._stage, self._losses = stage, losses

    def _loses(self) -> bool:
        return self._stage.random.random() < self._losses

    def create(self, key: str, data: bytes | bytearray, *, sha256: str | None = None) -> None:
        self._stage.hand_over()
        if self._loses():
            raise StoreError("the request was lost")
        super().create(key, data, sha256=sha256)
        if self._loses():
            self._stage.hand_over()
            if self._loses():
                raise StoreError("the reply was lost")
            super().create(key, data, sha256=sha256)  # a client that repeats itself meets its own object

    def read(self, key: str) -> bytes:
        self._stage.hand_over()
        if self._loses():
            raise StoreError("the request was lost")
        return super().read(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._stage.hand_over()
        if self._loses():
            raise StoreError("the request was lost")
        yield from super().list(prefix)


def variables(number: int, members: int, **more: str) -> dict[str, str]:
    named = {"RUN": "night", "STEP": "fit", "ATTEMPT": "1", "MEMBERS": str(members)}
    return {
        **{getattr(environment, name): value for name, value in named.items()},
        "NODE_RANK": str(number),
        **more,
    }


@dataclass
class Launcher:
    """One launcher, from its running program to its answer.

    ``dies_after`` turns its program meets ``end``; it runs on if that is None, until another member asks. After
    ``told_after`` turns it gets SIGTERM.
    """

    member: GangMember
    signals: Signals
    end: ProgramEnd | None
    dies_after: int = 0
    told_after: int | None = None
    has_committed: bool = False
    others: list["Launcher"] = field(default_factory=list)
    met: ProgramEnd | None = None
    """How its program did end."""
    answer: int | tuple[str, dict[str, str]] | None = None
    left_when_started: int = 0
    waited_seconds: float = 0.0
    """For its answer."""
    is_over: bool = False
    error: BaseException | None = None

    def act(self) -> None:
        end, turns = None, 0
        while end is None:
            turns += 1
            if self.told_after is not None and turns >= self.told_after:
                self.signals.is_stop_requested = True
                end = ProgramEnd(environment.EX_TEMPFAIL)
            elif self.end is not None and turns >= self.dies_after:
                end = self.end
            elif self.member.find_request(2) is not None:
                end = ProgramEnd(137, has_committed=self.has_committed, was_ended=True)
            elif turns > 500:  # nobody asks it: it completes its training
                end = ProgramEnd(0)
            else:
                self.signals.wait_next(0.5)
        self.met, ended_at = end, self.member.clock()
        self.answer = self.member.decide(end, ALLOWED, 1, lacked_memory=False)
        self.waited_seconds = self.member.clock() - ended_at
        self.left_when_started = sum(other.met is None for other in self.others)

    @property
    def has_started(self) -> bool:
        return isinstance(self.answer, tuple)


def play(
    seed: int,
    ends: list[ProgramEnd | None],
    losses: float = 0.0,
    told: int | None = None,
    *,
    elastic: str = "",
    committed: bool = True,
) -> list[Launcher]:
    """Launchers of a gang whose programs meet ``ends``; that of rank 0 has ``committed`` when another one asks."""
    stage = Stage(seed)
    store = LosingStore(stage, losses)
    more = {environment.ELASTIC: elastic} if elastic else {}
    launchers = []
    for number, end in enumerate(ends):
        signals = Signals(stage)
        member = GangMember(
            variables(number, len(ends), **more),
            signals,  # type: ignore[arg-type]
            store,
            lambda: stage.now,
        )
        told_after = stage.random.randrange(1, 20) if told == number else None
        is_gone = end is not None and end.code == environment.EX_TEMPFAIL
        dies_after = 0 if is_gone else stage.random.randrange(1, 10)
        has_committed = committed and number == 0
        launchers.append(Launcher(member, signals, end, dies_after, told_after, has_committed))
    for launcher in launchers:
        launcher.others = launchers
    stage.run(launchers)
    return launchers


def killed(*, committed: bool = False) -> ProgramEnd:
    return ProgramEnd(137, has_committed=committed)


SEEDS = st.integers(0, 2**32)
ENDS = st.sampled_from(
    [
        None,
        killed(),
        killed(committed=True),
        ProgramEnd(79, ["hang"]),
        ProgramEnd(1),
        ProgramEnd(1, ["infrastructure"]),
        ProgramEnd(1, ["user_error"]),
        ProgramEnd(1, [NEEDS_NEW_POD]),
        ProgramEnd(75),
    ]
)


@given(SEEDS, st.integers(2, 5), st.integers(0, 4))
def test_members_start_again_together_when_one_is_killed(seed: int, members: int, victim: int) -> None:
    ends: list[ProgramEnd | None] = [None] * members
    ends[victim % members] = killed(committed=victim % members == 0)
    launchers = play(seed, ends)
    assert [launcher.has_started for launcher in launchers] == [True] * members
    [answer] = {str(launcher.answer) for launcher in launchers}
    assert f"the program of member {victim % members} ended with 137 (infrastructure)" in answer
    assert not any(launcher.left_when_started for launcher in launchers)


@given(SEEDS, st.lists(ENDS, min_size=2, max_size=4), st.sampled_from([0.0, 0.1, 0.4]), st.none() | st.integers(0, 3))
@example(0, [killed(committed=True), None, None], 0.4, None)
def test_members_never_start_apart(seed: int, ends: list[ProgramEnd | None], losses: float, told: int | None) -> None:
    launchers = play(seed, ends, losses, told)
    started = [launcher for launcher in launchers if launcher.has_started]
    if not started:
        return
    assert len({str(launcher.answer) for launcher in started}) == 1
    assert not any(launcher.left_when_started for launcher in started), "a process of the one before is left"
    met = [launcher.met for launcher in launchers if launcher.met]
    assert not any({*end.failures} - {*ALLOWED} for end in met), "a member failed for a reason of its own"
    assert any(end.has_committed for end in met)
    # Who does not start has lost the store, or has been told to end: its pod ends, and with it the gang.
    silent = [launcher for launcher in launchers if not launcher.has_started]
    assert not silent or losses or any(launcher.signals.is_stop_requested for launcher in silent)


@given(SEEDS, st.integers(0, 2))
def test_members_without_a_commit_end_with_the_code_of_the_one_that_died(seed: int, victim: int) -> None:
    ends: list[ProgramEnd | None] = [None] * 3
    ends[victim] = ProgramEnd(79, ["hang"])
    ends[0] = ends[0] or ProgramEnd(1, ["infrastructure"])
    launchers = play(seed, ends, committed=False)
    assert not any(launcher.has_started for launcher in launchers)
    # Whichever died first says the cause.
    assert {launcher.answer for launcher in launchers} <= {79, 1}
    assert len({launcher.answer for launcher in launchers}) == 1


@given(SEEDS)
def test_members_end_together_when_one_failed_for_a_reason_of_its_own(seed: int) -> None:
    """Also where another one, which lost it, was faster to ask."""
    launchers = play(seed, [killed(committed=True), ProgramEnd(1, ["user_error"]), None])
    was_faster = launchers[1].met is not launchers[1].end  # then the others ended it before it met its error
    assert [launcher.has_started for launcher in launchers] == [was_faster] * 3


@given(SEEDS)
def test_members_of_an_elastic_gang_go_on_without_one_that_is_gone(seed: int) -> None:
    """A pod that was lost is never ready; its launcher has ended, as by the kernel."""
    launchers = play(seed, [None, killed(), None, ProgramEnd(75)], elastic="2:4")
    gone = launchers[3]
    assert not gone.has_started
    assert [launcher.has_started for launcher in launchers[:3]] == [True] * 3
    assert launchers[0].member.awaited == {0, 1, 2}


def late_member(store: MemoryStore, number: int, **more: str) -> GangMember:
    """A member that came after the start of a gang of two, of at most four."""
    environ = variables(number, 2, **{environment.ELASTIC: "2:4"}, **more)
    return GangMember(environ, Signals(Stage(1)), store)  # type: ignore[arg-type]


def test_late_member_starts_as_the_incarnation_that_the_others_run() -> None:
    store, port = MemoryStore(), {"PET_RDZV_ENDPOINT": "first:29500"}
    assert late_member(store, 4, **port).join() == {}
    first = late_member(store, 0)
    assert first.join() == {}
    for incarnation in (2, 3):
        first.claim_decision(incarnation, port=29500 + incarnation)
    assert late_member(store, 4, **port).join() == {
        environment.INCARNATION: "3",
        "PET_RDZV_ENDPOINT": "first:29503",
    }
    first.claim_decision(4, exit_code=1, reason="no checkpoint")
    assert late_member(store, 5).join() == {environment.INCARNATION: "3"}, "the others did not start the fourth"


def test_late_member_is_awaited_until_a_restart_goes_on_without_it() -> None:
    store = MemoryStore()
    first = late_member(store, 0)
    assert first.find_awaited() == {0, 1}
    late_member(store, 4).join()
    assert first.find_awaited() == {0, 1, 4}
    first.note_ready({0, 4})
    assert first.find_awaited() == {0, 4}
    late_member(store, 5).join()
    assert first.find_awaited() == {0, 4, 5}


def test_late_member_can_be_spared_by_a_gang_that_began_with_its_fewest() -> None:
    store = MemoryStore()
    late_member(store, 4).join()
    late_member(store, 4).refuse(2, 1, "its GPU is broken")
    assert late_member(store, 0).claim_decision(2, port=1).exit_code is None
    alone = MemoryStore()
    late_member(alone, 1).refuse(2, 1, "its GPU is broken")
    assert late_member(alone, 0).claim_decision(2, port=1).exit_code == 1


@given(SEEDS)
def test_late_member_starts_again_with_the_others(seed: int) -> None:
    stage = Stage(seed)
    store = LosingStore(stage, 0.0)
    launchers = []
    for number in (0, 1, 4):
        signals = Signals(stage)
        environ = variables(number, 2, **{environment.ELASTIC: "2:4"})
        member = GangMember(environ, signals, store, lambda: stage.now)  # type: ignore[arg-type]
        end = killed(committed=True) if number == 1 else None
        launchers.append(Launcher(member, signals, end, 20, has_committed=number == 0))
    MemoryStore.create(store, f"{joined_members_prefix(RunLayout('night'), 'fit', 1)}00004", b"")
    for launcher in launchers:
        launcher.others = launchers
    stage.run(launchers)
    assert [launcher.has_started for launcher in launchers] == [True] * 3
    assert not any(launcher.left_when_started for launcher in launchers)


def test_member_that_was_ready_and_is_asked_to_end_then_is_not_counted_on() -> None:
    stage = Stage(1)
    store = MemoryStore()
    environ = variables(0, 3, **{environment.ELASTIC: "2:3"})
    member = GangMember(environ, Signals(stage), store, lambda: stage.now)  # type: ignore[arg-type]
    for name in ("00001", "00001-gone", "00002-gone"):
        store.create(f"{member.prefix(2)}ready/{name}", b"")
    asked = {"run": member.run, "step": member.step, "attempt": member.attempt, "incarnation": 2, "member": 0}
    request = GangRestartRequest(**asked, cause=Cause.INFRASTRUCTURE, exit_code=137, ended_at=utc_now())
    decision = GangRestart(member, request, has_committed=True).poll()
    assert decision is not None
    assert (decision.exit_code, decision.reason) == (137, "1 of 3 members were ready after 0 s")


def test_members_wait_for_one_that_does_not_end_no_longer_than_they_say() -> None:
    stage = Stage(1)
    store = LosingStore(stage, 0.0)
    signals = [Signals(stage) for _ in range(2)]
    members = [
        GangMember(variables(number, 3), signals[number], store, lambda: stage.now)  # type: ignore[arg-type]
        for number in range(2)
    ]
    launchers = [
        Launcher(members[0], signals[0], killed(committed=True), 1),
        Launcher(members[1], signals[1], None),
    ]
    stage.run(launchers)
    assert [launcher.answer for launcher in launchers] == [137, 137]
    assert READY_SECONDS < stage.now < 3 * READY_SECONDS


@pytest.mark.parametrize(
    ("elastic", "gone", "code", "answer"),
    [
        ("", 1, 0, 137),  # it is complete, and its pod has ended
        ("", 0, 0, 137),
        ("", 1, 1, 1),  # the others have lost it
        ("2:3", 1, 0, "the program of member 2 ended with 137 (infrastructure)"),
        ("2:3", 1, 1, "the program of member 2 ended with 137 (infrastructure)"),
        ("2:3", 1, 75, "the program of member 2 ended with 137 (infrastructure)"),  # its node was drained
        ("2:3", 0, 0, 137),  # torchrun meets at the first, which is complete
        ("2:3", 0, 75, "member 0 is gone (preemption)"),
        ("3:4", 1, 0, 137),  # one too few
    ],
)
def test_members_do_not_wait_for_one_that_has_ended_before(
    elastic: str, gone: int, code: int, answer: int | str
) -> None:
    stage = Stage(1)
    store = LosingStore(stage, 0.0)
    more = {environment.ELASTIC: elastic} if elastic else {}
    signals = [Signals(stage) for _ in range(3)]
    members = [
        GangMember(variables(number, 3, **more), signals[number], store, lambda: stage.now)  # type: ignore[arg-type]
        for number in range(3)
    ]
    ends = [
        ProgramEnd(code) if number == gone else killed(committed=True) if number == 2 else None for number in range(3)
    ]
    launchers = [
        Launcher(member, signal, end, 100 if number == 2 else 1)
        for number, (member, signal, end) in enumerate(zip(members, signals, ends, strict=True))
    ]
    signals[gone].is_stop_requested = code == environment.EX_TEMPFAIL
    stage.run(launchers)
    assert launchers.pop(gone).answer == code
    assert max(launcher.waited_seconds for launcher in launchers) < READY_SECONDS / 2
    assert {launcher.answer[0] if launcher.has_started else launcher.answer for launcher in launchers} == {answer}  # type: ignore[index]


def survivors(stage: Stage, store: LosingStore, numbers: Sequence[int] = (1, 2, 3), **more: str) -> list[Launcher]:
    """Launchers of a gang of four that has lost its first member without a word; torchrun fails on each of them."""
    launchers = []
    for number in numbers:
        environ = variables(number, 4, **{environment.ELASTIC: "2:4", **more})
        signals = Signals(stage)
        member = GangMember(environ, signals, store, lambda: stage.now)  # type: ignore[arg-type]
        launchers.append(Launcher(member, signals, ProgramEnd(1), stage.random.randrange(1, 40)))
    for launcher in launchers:
        launcher.others = launchers
    return launchers


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether the hosts take connections, by the end points at which members try; a name has an address."""
    found: dict[str, bool] = {}

    def find_listener(endpoint: str) -> str:
        return endpoint if found.setdefault(endpoint, True) else ""

    monkeypatch.setattr(rendezvous, "find_listener", find_listener)
    return found


@given(seed=SEEDS, losses=st.sampled_from([0.0, 0.1]))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_members_go_on_at_another_one_when_the_first_is_lost(
    listening: dict[str, bool], seed: int, losses: float
) -> None:
    stage, first = Stage(seed), "gang-0.members:29500"
    store = LosingStore(stage, losses)
    launchers = survivors(stage, store, PET_RDZV_ENDPOINT=first, PET_RDZV_CONF="join_timeout=9,is_host=0")
    listening[first] = True
    assert not any(launcher.member.rendezvous.misses_host() for launcher in launchers)
    listening[first] = False
    stage.run(launchers)
    started = [launcher for launcher in launchers if launcher.has_started]
    assert len(started) == 3 or losses
    for launcher in started:
        assert isinstance(launcher.answer, tuple)
        assert launcher.answer[0] == "member 0 is gone (infrastructure)"
        given = launcher.answer[1]
        assert given["PET_RDZV_ENDPOINT"] == f"gang-{launcher.member.rendezvous.host}.members:29500"
        is_host = launcher.member.number == launcher.member.rendezvous.host
        assert given["PET_RDZV_CONF"] == f"join_timeout=9,is_host={int(is_host)}"
    assert len({launcher.member.rendezvous.host for launcher in started}) <= 1
    assert losses or {launcher.member.rendezvous.host for launcher in started} == {1}
    assert losses or not any(launcher.left_when_started for launcher in launchers)


def test_members_end_when_too_few_are_left_without_the_first(listening: dict[str, bool]) -> None:
    stage = Stage(3)
    [launcher] = survivors(stage, LosingStore(stage, 0.0), [2], PET_RDZV_ENDPOINT="gang-0.members:29500")
    assert not launcher.member.rendezvous.misses_host()
    listening["gang-0.members:29500"] = False
    stage.run([launcher])
    assert launcher.answer == 137


def test_members_that_fail_by_themselves_do_not_miss_the_first(listening: dict[str, bool]) -> None:
    """It listens, or has never listened, or has decided for all."""
    for listens, has_met, decides in ((True, True, False), (False, False, False), (False, True, True)):
        stage, store = Stage(4), MemoryStore()
        [launcher] = survivors(stage, store, [2], PET_RDZV_ENDPOINT="gang-0.members:29500")  # type: ignore[arg-type]
        listening["gang-0.members:29500"] = has_met
        launcher.member.rendezvous.misses_host()
        listening["gang-0.members:29500"] = listens
        if decides:
            late_member(store, 0).claim_decision(2, exit_code=3, reason="its program ended with 3")
        stage.run([launcher])
        assert launcher.answer == 1
        assert launcher.member.find_request(2) is None


def test_member_that_is_back_starts_as_the_others_and_is_no_host(listening: dict[str, bool]) -> None:
    store, first = MemoryStore(), {"PET_RDZV_ENDPOINT": "gang-0.members:29500", "PET_RDZV_CONF": "is_host=1"}
    late_member(store, 1).ask_without_host(2)
    late_member(store, 1).claim_decision(2, port=29502)
    back = late_member(store, 0, **first)
    answer = back.decide(ProgramEnd(137, was_ended=True), ALLOWED, 1, lacked_memory=False)
    assert isinstance(answer, tuple)
    assert answer[1]["PET_RDZV_ENDPOINT"] == "gang-1.members:29502"
    assert answer[1]["PET_RDZV_CONF"] == "is_host=0"
    assert not back.is_host


def test_member_misses_a_host_after_ten_seconds_without_a_connection(listening: dict[str, bool]) -> None:
    now, environ = [0.0], {environment.ELASTIC: "2:4", "PET_RDZV_ENDPOINT": "gang-0.members:29500"}
    place = rendezvous.Rendezvous(environ, 2, clock=lambda: now[0])
    listening["gang-0.members:29500"] = False

    def lost_after(seconds: float) -> float | None:
        began = now[0]
        while now[0] < began + seconds:
            now[0] += 0.5
            if place.is_host_lost():
                return now[0] - began
        return None

    assert lost_after(3600) is None, "its pod may still be pulling an image"
    listening["gang-0.members:29500"] = True
    assert lost_after(60) is None
    listening["gang-0.members:29500"] = False
    seconds = lost_after(60)
    assert seconds is not None and 8 <= seconds <= 13
    place.move(GangRestartDecision(run="r", step="s", attempt=1, incarnation=2, port=29500, host=1))
    listening["gang-1.members:29500"] = False
    seconds = lost_after(600)
    assert seconds is not None and 118 <= seconds <= 125, "it was there when the start was decided"
    place.move(GangRestartDecision(run="r", step="s", attempt=1, incarnation=3, port=29500, host=2))
    assert lost_after(600) is None, "this member is the host"


def test_connection_is_tried_at_the_address_that_took_the_first_one() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert rendezvous.find_listener(f"localhost:{port}") == f"127.0.0.1:{port}"
    assert not rendezvous.find_listener(f"localhost:{port}")
    assert not rendezvous.find_listener("")


def test_member_that_was_complete_does_not_complete_the_others() -> None:
    stage, store = Stage(1), MemoryStore()
    complete, dead = (
        GangMember(variables(number, 2), Signals(stage), store, lambda: stage.now)  # type: ignore[arg-type]
        for number in range(2)
    )
    complete.refuse(2, 0, "it lacked memory, and was complete all the same")
    assert dead.decide(killed(), ALLOWED, 1, lacked_memory=False) == 137


@pytest.mark.parametrize(
    ("end", "lacked_memory", "follows"),
    [
        (ProgramEnd(137, was_ended=True), False, True),
        (ProgramEnd(75, was_ended=True), False, True),
        (ProgramEnd(1), False, True),  # it lost the other one
        (ProgramEnd(0), False, True),
        (ProgramEnd(1, ["infrastructure"]), False, True),
        (ProgramEnd(1, ["user_error"]), False, False),
        (ProgramEnd(137, ["user_error"], was_ended=True), False, False),
        (ProgramEnd(1, [NEEDS_NEW_POD]), False, False),
        (ProgramEnd(1, ["out_of_memory"]), False, False),
        (ProgramEnd(137, was_ended=True), True, False),
        (ProgramEnd(75), False, False),
        (ProgramEnd(76), False, False),
        (ProgramEnd(69), False, False),
    ],
)
def test_member_follows_another_unless_its_own_end_forbids_it(
    end: ProgramEnd, lacked_memory: bool, follows: bool
) -> None:
    assert may_follow(end, ALLOWED, lacked_memory=lacked_memory) == follows


def test_port_that_is_still_bound_is_passed_over() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        taken = listener.getsockname()[1]
        member = GangMember(variables(0, 2, MASTER_PORT=str(taken)), Signals(Stage(1)), MemoryStore())  # type: ignore[arg-type]
        assert (member.find_port() or 0) > taken
    assert member.find_port() == taken


def test_port_after_one_that_is_bound_is_none_that_a_connection_gets() -> None:
    """Linux gives a listener an odd port, and a connection an even one."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        taken = listener.getsockname()[1]
        member = GangMember(variables(0, 2, MASTER_PORT=str(taken)), Signals(Stage(1)), MemoryStore())  # type: ignore[arg-type]
        assert ((member.find_port() or 0) - taken) % 2 == 0


@pytest.mark.parametrize(("members", "seconds"), [(2, 0.5), (200, 0.5), (1000, 2.5), (4000, 10.0)])
def test_polls_of_all_members_are_bounded(members: int, seconds: float) -> None:
    member = GangMember(variables(1, members), Signals(Stage(1)), MemoryStore())  # type: ignore[arg-type]
    assert member.poll_seconds == seconds
    assert members / member.poll_seconds <= 400
