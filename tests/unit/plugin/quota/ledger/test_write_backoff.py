"""Two services that write one object without a pause, in virtual time: the slower one comes to write, too."""

import heapq
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from tiphys_plugin.quota.ledger.kubernetes_ledger import WriteBackoff

FOR_SECONDS = 60.0


class Site:
    """One object, its version, and who has written it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.version = 0
        self.written: Counter[str] = Counter()
        self.longest_in_vain = 0

    def service(self, name: str, took: float, *, leaves_gaps: bool) -> Iterator[float]:
        """Read, decide and write for ever; it yields how long each takes."""
        waits: list[float] = []
        gaps, lost, own = WriteBackoff(waits.append, lambda: self.now), 0, 0
        while True:
            if leaves_gaps:
                gaps.wait()
                yield sum(waits)
                waits.clear()
            read = self.version
            yield took
            if self.version == read:
                self.version += 1
                self.written[name] += 1
                gaps.record_write(took, read - own)
                own = self.version
                lost = 0
            else:
                lost += 1
                self.longest_in_vain = max(self.longest_in_vain, lost)

    def run(self, *services: Iterator[float]) -> None:
        due = [(random.random() / 100, number) for number in range(len(services))]
        while (next_one := heapq.heappop(due))[0] < FOR_SECONDS:
            self.now, number = next_one
            heapq.heappush(due, (self.now + next(services[number]), number))


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(11)


def test_without_gaps_the_slower_one_never_writes() -> None:
    site = Site()
    site.run(site.service("quick", 0.04, leaves_gaps=False), site.service("slow", 0.05, leaves_gaps=False))
    assert site.written["slow"] == 0


def test_slower_service_writes_again_and_again_with_gaps() -> None:
    site = Site()
    site.run(site.service("quick", 0.04, leaves_gaps=True), site.service("slow", 0.05, leaves_gaps=True))
    assert site.written["slow"] > 100
    assert site.longest_in_vain < 16, "as often as a service tries"


def test_services_of_equal_speed_write_in_equal_parts() -> None:
    site = Site()
    site.run(*(site.service(name, 0.04, leaves_gaps=True) for name in "abc"))
    assert min(site.written.values()) > 0.2 * site.version
    assert site.longest_in_vain < 16


def test_a_service_that_writes_seldom_does_not_wait() -> None:
    waits: list[float] = []
    now = 0.0
    gaps = WriteBackoff(waits.append, lambda: now)
    gaps.wait()
    for _ in range(20):
        gaps.record_write(0.04, 0)
        now += 0.04
        gaps.wait()
    assert not waits
    for _ in range(20):
        gaps.record_write(0.04, 0)
        gaps.wait()
    assert waits
    assert max(waits) <= 0.04
    waits.clear()
    for _ in range(40):
        gaps.record_write(0.04, 1000)
        gaps.wait()
    assert 0.1 < max(waits) <= 0.2, "others make it wait longer, within a bound"
