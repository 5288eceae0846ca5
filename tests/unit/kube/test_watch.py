"""A watch that goes on for ever, however often it is interrupted.

| what happens | the caller sees |
|---|---|
| start | Synced, then each change once |
| the server ends the watch, or the line breaks | nothing; the watch goes on where it was |
| the version is forgotten (410) | Synced again |
| the server is away, or does not know the kind | nothing; `lost` is told |
"""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from typing import Any

import pytest
from support.servers.kube_server import KubeServer

from tiphys.errors import StoreError, UsageError
from tiphys.kube import KubeApi, ListSnapshot, Object, WatchEvent, WatchEventType, watch_objects
from tiphys.kube.resources import CONFIG_MAPS, PODS

_LONG = 60.0

Watching = Callable[..., Iterator[ListSnapshot | WatchEvent]]


def pod(name: str, **labels: str) -> Object:
    return {"metadata": {"name": name, "labels": labels}}


def names(event: ListSnapshot | WatchEvent) -> Any:
    if isinstance(event, ListSnapshot):
        return [one["metadata"]["name"] for one in event.objects]
    return event.type.value, event.object["metadata"]["name"]


@pytest.fixture
def watching(api: KubeApi) -> Iterator[Watching]:
    """Follow the pods of one namespace; closed at the end, because an error that a test keeps keeps its watch open."""
    with ExitStack() as stack:

        def begin(**settings: Any) -> Iterator[ListSnapshot | WatchEvent]:
            return stack.enter_context(closing(watch_objects(api, PODS, "ml", **{"sleep": lambda _: None, **settings})))

        yield begin


def take(events: Iterator[ListSnapshot | WatchEvent], number: int) -> list[Any]:
    return [names(event) for event in islice(events, number)]


def test_first_everything_there_is_then_every_change(api: KubeApi, watching: Watching) -> None:
    api.create(PODS, "ml", pod("old"))
    events = watching()
    assert take(events, 1) == [["old"]]
    api.create(PODS, "ml", pod("new"))
    api.create(PODS, "other", pod("elsewhere"))
    api.patch(PODS, "ml", "old", {"metadata": {"labels": {"a": "b"}}})
    api.delete(PODS, "ml", "new")
    assert take(events, 3) == [("ADDED", "new"), ("MODIFIED", "old"), ("DELETED", "new")]


def test_selectors_hold_for_list_and_watch(api: KubeApi, watching: Watching) -> None:
    for name, kind in (("one", "yes"), ("two", "no")):
        api.create(PODS, "ml", pod(name, wanted=kind))
    events = watching(labels="wanted=yes", fields="metadata.name!=four")
    assert take(events, 1) == [["one"]]
    api.create(PODS, "ml", pod("three", wanted="no"))
    api.create(PODS, "ml", pod("four", wanted="yes"))
    api.patch(PODS, "ml", "two", {"metadata": {"labels": {"wanted": "yes"}}})
    api.patch(PODS, "ml", "one", {"metadata": {"labels": {"wanted": "no"}}})
    assert take(events, 2) == [("ADDED", "two"), ("DELETED", "one")]


def test_a_broken_watch_goes_on_where_it_was(api: KubeApi, server: KubeServer, watching: Watching) -> None:
    lost: list[StoreError] = []
    events = watching(on_error=lost.append)
    assert take(events, 1) == [[]]
    for index in range(3):
        api.create(PODS, "ml", pod(f"pod-{index}"))
        assert take(events, 1) == [("ADDED", f"pod-{index}")]
        server.drop_watches()
    api.create(PODS, "ml", pod("last"))
    assert take(events, 1) == [("ADDED", "last")]
    assert len(lost) == 3
    assert server.count("list") == 1


def test_a_watch_that_the_server_ends_goes_on_without_a_word(
    api: KubeApi, server: KubeServer, watching: Watching
) -> None:
    lost: list[StoreError] = []
    events = watching(on_error=lost.append, timeout_seconds=0)
    assert take(events, 1) == [[]]
    for index in range(3):
        api.create(PODS, "ml", pod(f"pod-{index}"))
        assert take(events, 1) == [("ADDED", f"pod-{index}")]
    assert (lost, server.count("list")) == ([], 1)


def test_a_bookmark_moves_a_quiet_watch_past_what_is_forgotten(
    api: KubeApi, server: KubeServer, watching: Watching
) -> None:
    bookmarks: list[int] = []

    def after_each_event() -> bool:
        if server.count("watch") and not bookmarks:
            bookmarks.append(server.store.version)
            server.compact()
            api.create(PODS, "ml", pod("one"))
        return False

    events = watching(timeout_seconds=0, should_stop=after_each_event)
    assert take(events, 1) == [[]]
    api.create(CONFIG_MAPS, "ml", pod("of another kind"))
    assert take(events, 1) == [("ADDED", "one")]
    assert bookmarks
    assert server.count("list") == 1


def test_a_forgotten_version_is_listed_anew(api: KubeApi, server: KubeServer, watching: Watching) -> None:
    events = watching()
    api.create(PODS, "ml", pod("stays"))
    assert take(events, 1) == [["stays"]]
    api.create(PODS, "ml", pod("new"))
    server.compact()
    assert take(events, 1) == [["new", "stays"]]
    server.fail_next(410, verb="watch")
    assert take(events, 1) == [["new", "stays"]]


def test_a_server_that_is_away_is_asked_again_after_longer_and_longer_pauses(
    api: KubeApi, server: KubeServer, watching: Watching
) -> None:
    pauses: list[float] = []
    lost: list[StoreError] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 8:
            server.resume()

    server.pause()
    assert take(watching(sleep=pause, on_error=lost.append), 1) == [[]]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert len(lost) == 8


def test_a_kind_that_comes_later_is_found(api: KubeApi, server: KubeServer, watching: Watching) -> None:
    lost: list[StoreError] = []
    server.unknown.add("pods")
    events = watching(sleep=lambda _: server.unknown.clear(), on_error=lost.append)
    assert take(events, 1) == [[]]
    assert "does not serve /api/v1/namespaces/ml/pods" in str(lost[0])


def test_a_server_that_ends_every_watch_at_once_is_not_asked_without_pause(
    api: KubeApi, server: KubeServer, watching: Watching
) -> None:
    pauses: list[float] = []
    server.fail_next(200, verb="watch", body=b"", times=3)
    events = watching(sleep=pauses.append)
    api.create(PODS, "ml", pod("old"))
    assert take(events, 1) == [["old"]]
    api.create(PODS, "ml", pod("new"))
    assert take(events, 1) == [("ADDED", "new")]
    assert pauses == [0.5, 0.5, 0.5]


def test_a_version_that_expires_again_and_again_is_not_asked_without_pause(
    api: KubeApi, server: KubeServer, watching: Watching
) -> None:
    pauses: list[float] = []
    server.fail_next(410, verb="watch", times=3)
    assert take(watching(sleep=pauses.append), 4) == [[]] * 4
    assert len(pauses) == 3


def test_a_wrong_selector_is_an_error_of_the_caller(api: KubeApi, server: KubeServer, watching: Watching) -> None:
    server.fail_next(400, verb="list", message="unable to parse requirement")
    with pytest.raises(UsageError, match="unable to parse"):
        next(watching(labels="(("))


def test_stopped_is_asked_after_each_event(api: KubeApi, server: KubeServer, watching: Watching) -> None:
    stop = threading.Event()
    events = watching(should_stop=stop.is_set)
    assert take(events, 1) == [[]]
    for name in ("one", "two"):
        api.create(PODS, "ml", pod(name))
    assert take(events, 1) == [("ADDED", "one")]
    stop.set()
    assert take(events, 9) == []
    assert take(watching(should_stop=stop.is_set), 9) == []


class Mirror:
    """What a caller knows by the events alone. Complains of what was missed, or told twice."""

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        self.highest = 0
        self.told: list[tuple[str, str, int]] = []

    def learn(self, event: ListSnapshot | WatchEvent) -> None:
        if isinstance(event, ListSnapshot):
            self.versions = {one["metadata"]["name"]: version(one) for one in event.objects}
            self.told.clear()
            return
        name, now = event.object["metadata"]["name"], version(event.object)
        assert now > self.highest, f"{name} at {now} comes again, or too late"
        assert (name in self.versions) == (event.type is not WatchEventType.ADDED), f"{event.type} {name} at {now}"
        self.highest = now
        self.told.append((event.type.value, name, now))
        if event.type is WatchEventType.DELETED:
            del self.versions[name]
        else:
            self.versions[name] = now


def version(found: Object) -> int:
    return int(found["metadata"]["resourceVersion"])


def disturb(server: KubeServer, chance: random.Random) -> None:
    match chance.randrange(8):
        case 0:
            server.drop_watches()
        case 1:
            server.drop_watches(clean=True)
        case 2:
            server.compact()
        case 3:
            server.send_bookmarks()
        case 4:
            server.fail_next(chance.choice([0, 410, 429, 500]), verb=chance.choice(["list", "watch"]))


def change(api: KubeApi, chance: random.Random, alive: list[str], number: int) -> None:
    if alive and chance.random() < 0.3:
        api.delete(PODS, "ml", alive.pop(chance.randrange(len(alive))))
    elif alive and chance.random() < 0.5:
        api.patch(PODS, "ml", chance.choice(alive), {"metadata": {"labels": {"n": str(number)}}})
    else:
        alive.append(api.create(PODS, "ml", pod(f"pod-{number}"))["metadata"]["name"])


@pytest.mark.parametrize("seed", range(12))
def test_an_interrupted_watch_misses_and_repeats_no_change(
    api: KubeApi, server: KubeServer, watching: Watching, seed: int
) -> None:
    chance, alive, mirror = random.Random(seed), list[str](), Mirror()
    done = threading.Event()
    events = watching(should_stop=done.is_set, timeout_seconds=chance.choice([0, 300]))

    def follow() -> None:
        for event in events:
            mirror.learn(event)
            if "the-end" in mirror.versions:
                done.set()

    with in_background(follow) as answer:
        for number in range(40):
            change(api, chance, alive, number)
            disturb(server, chance)
        api.create(PODS, "ml", pod("the-end"))
        answer()
    expected = {one["metadata"]["name"]: version(one) for one in server.objects("pods", "ml")}
    assert mirror.versions == expected


@contextmanager
def in_background(work: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Run it in a thread; the value waits for its result."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        yield lambda: future.result(_LONG)
