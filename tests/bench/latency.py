"""How long open steps wait for their stored answer: from the created task set to the watch event that holds it."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.place import Place
from support.builders.admissions import live_workflow, open_task_set
from support.processes.polling import until

from tiphys.kube import ListSnapshot, WatchEventType, watch_objects
from tiphys.kube.resources import WORKFLOW_TASK_SETS, WORKFLOWS

LONGEST_ROUND_SECONDS = 600.0


class Answers:
    """When which node was first seen with a final answer."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._stop = threading.Event()
        self.seen_at: dict[str, float] = {}
        self.failed: list[str] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Answers":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._place.cluster.kubectl("annotate", "workflowtasksets", "--all", "bench=over", "-n", self._place.namespace)
        self._thread.join(90)

    def _watch(self) -> None:
        place = self._place
        events = watch_objects(
            place.api, WORKFLOW_TASK_SETS, place.namespace, sleep=self._stop.wait, should_stop=self._stop.is_set
        )
        for event in events:
            now = time.monotonic()
            found = event.objects if isinstance(event, ListSnapshot) else [event.object]
            if isinstance(event, ListSnapshot) or event.type is not WatchEventType.DELETED:
                for one in found:
                    self._note(one, now)

    def _note(self, found: dict[str, Any], now: float) -> None:
        for node, entry in ((found.get("status") or {}).get("nodes") or {}).items():
            if entry["phase"] in ("Succeeded", "Failed") and node not in self.seen_at:
                self.seen_at[node] = now
                if entry["phase"] == "Failed":
                    self.failed.append(f"{node}: {entry['message']}")


def one_round(place: Place, answers: Answers, name: str, sizes: Sequence[int]) -> list[float]:
    """Milliseconds of each step, where workflows with so many open steps come at once."""
    names = [f"{name}-{index}" for index in range(len(sizes))]
    uids = {}
    for one, size in zip(names, sizes, strict=True):
        made = place.api.create(WORKFLOWS, place.namespace, live_workflow(one, place.namespace, place.store.url, size))
        uids[one] = made["metadata"]["uid"]
    created_at: dict[str, float] = {}

    def create(one: str, size: int) -> None:
        made = open_task_set(one, place.namespace, uids[one], size)
        created_at[one] = time.monotonic()
        place.api.create(WORKFLOW_TASK_SETS, place.namespace, made)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(create, names, sizes))
    nodes = {f"{one}-{step}": one for one, size in zip(names, sizes, strict=True) for step in range(size)}
    until(lambda: nodes.keys() <= answers.seen_at.keys(), LONGEST_ROUND_SECONDS)
    assert not answers.failed, answers.failed[0]
    for one in names:
        place.api.delete(WORKFLOW_TASK_SETS, place.namespace, one)
        place.api.delete(WORKFLOWS, place.namespace, one)
    return [1000 * (answers.seen_at[node] - created_at[owner]) for node, owner in nodes.items()]
