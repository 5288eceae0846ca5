"""The two stories: all of etcd is lost, and an hour in which pods are evicted, preempted and lose their nodes."""

import random
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from argo.settings import Settings
from bench.fleet.fleet import GPUS, NODE_GROUP, TIGHT_QUEUE, Fleet, add_nodes, apply_queues, costs, fleet, tiphys
from bench.fleet.pods import PodSeen
from bench.progress import say
from bench.samples import percentile, significant
from cluster.harness.fake_nodes import Group, manifest

from tiphys.kube.resources import NODES, PODS

SAVE_SECONDS, SHORT_SECONDS = 300.0, 60.0
"""Mean time from save to save of a training, and how long one of higher priority lasts, which saves once."""
_PATIENCE_SECONDS = 3600.0
EVICTED, NODE_LOST, FOR_ANOTHER = "pod evicted", "node lost", "for one of higher priority"
_NODE_RETURNS_SECONDS = 120.0
_LOOK_SECONDS = 30.0


def lose_etcd(settings: Settings, runs: int, rebuild: str, save_seconds: float) -> dict[str, Any]:
    """``runs`` trainings are in flight when a cluster loses its etcd; all go on from the bucket.

    Args:
        settings: The cluster.
        runs: Trainings.
        rebuild: Command that empties etcd, and installs Argo and Tiphys as the documents say.
        save_seconds: Time from save to save of each.
    """
    went_on = False
    steps = lambda _: 0 if went_on else 1 << 30  # noqa: E731  nobody is done before all go on
    add_nodes(runs)
    apply_queues(settings, runs)
    with fleet(settings, lambda run: steps(run), lambda _: save_seconds) as here:
        began = time.monotonic()
        sent = here.submit(runs)
        say(f"{runs} Workflows created")
        reached(here, "all have committed", lambda: len(here.trainings.acknowledged) >= runs)
        up_seconds, before = time.monotonic() - began, dict(here.trainings.acknowledged)
        say("etcd is lost")
        lost_at = time.monotonic()
        here.watch.set()
        done = subprocess.run(["sh", "-c", rebuild], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the command of --rebuild ended with {done.returncode}: {done.stderr[-2000:]}")
        here.pods.lose_all("etcd lost")
        add_nodes(runs)
        apply_queues(settings, runs)
        here.trainings.until(lambda: not here.trainings.running, 60)
        installed_at = time.monotonic()
        say(f"installed again after {installed_at - lost_at:.0f} s")
        here.rewatch()
        recovered = _Command(["recover", _this_cluster(settings), "-n", settings.namespace, "--store", settings.store])
        running_again: dict[str, float] = {}

        def again(share: float) -> bool:
            now = time.monotonic()
            for program in here.trainings.running.values():
                running_again.setdefault(program.pod.run, now)
            return len(running_again) >= share * runs

        reached(here, "half of them go on", lambda: again(0.5))
        reached(here, "all of them go on", lambda: again(1.0))
        recovered.check()
        times = sorted(running_again.values())
        went_on = True
        reached(here, "all have come to their end", lambda: len(here.trainings.results) >= runs)
        reached(here, "all Workflows have succeeded", lambda: _succeeded(here) >= runs, look=5.0)
        starts = here.trainings.starts
        from_newest = sum(1 for run in sent if dict(starts[run]).get(2, -1) >= before[run])
        return {
            "settings": {"runs": runs, "save_seconds": save_seconds},
            "seconds": {
                "all_up": significant(up_seconds),
                "installed": significant(installed_at - lost_at),
                "command": significant(recovered.seconds),
                "half": significant(times[runs // 2 - 1] - lost_at),
                "all": significant(times[-1] - lost_at),
                "half_from_installed": significant(times[runs // 2 - 1] - installed_at),
                "all_from_installed": significant(times[-1] - installed_at),
            },
            "from_newest": from_newest,
            **_outcome(here, runs),
            "costs": costs(),
        }


@dataclass
class _Hour:
    """The faults of an hour, and when each pod of its victims ended."""

    here: Fleet
    random: random.Random
    with_room: set[str]
    """Runs of the queue that has room for them."""
    high: set[str] = field(default_factory=set)
    lost_nodes: list[tuple[float, str]] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)

    def strike(self) -> None:
        """One fault: of a training that runs, or by one that takes the GPUs of another."""
        kind = self.random.choices((EVICTED, NODE_LOST, FOR_ANOTHER), (0.6, 0.2, 0.2))[0]
        pods = (each.pod for each in self.here.trainings.running.values())
        running = sorted((pod for pod in pods if pod.run in self.with_room and not pod.why), key=lambda pod: pod.name)
        if not running:
            return
        self.counted[kind] += 1
        if kind == FOR_ANOTHER:
            self.high.update(self.here.submit(1, TIGHT_QUEUE, priority=10))
            return
        pod = self.random.choice(running)
        pod.why = kind
        if kind == EVICTED:
            self.here.api.delete(PODS, self.here.settings.namespace, pod.name)
        else:
            self.here.api.delete(NODES, None, pod.node)
            self.lost_nodes.append((time.monotonic() + _NODE_RETURNS_SECONDS, pod.node))

    def bring_back(self) -> None:
        """Nodes that have been away long enough."""
        while self.lost_nodes and self.lost_nodes[0][0] <= time.monotonic():
            _, name = self.lost_nodes.pop(0)
            restore_node(self.here, name)


def hour(settings: Settings, runs: int, minutes: float, fault_seconds: float, seed: int) -> dict[str, Any]:
    """``runs`` trainings on as many nodes, a fault every ``fault_seconds``, for so many minutes; then all end."""
    ends = False
    chance, spare, tight = random.Random(seed), max(2, runs // 50), max(2, runs // 10)
    high: set[str] = set()
    paces: dict[str, float] = {}

    def steps(run: str) -> int:
        return 0 if ends or run in high else 1 << 30

    def save_seconds(run: str) -> float:
        if run in high or ends:
            return SHORT_SECONDS
        return paces.setdefault(run, SAVE_SECONDS * chance.uniform(0.5, 1.5))  # not all at once

    add_nodes(runs + spare)
    apply_queues(settings, runs - tight + spare, tight)
    with fleet(settings, steps, save_seconds) as here:
        began = time.monotonic()
        with_room = here.submit(runs - tight)
        low = [*with_room, *here.submit(tight, TIGHT_QUEUE)]
        story = _Hour(here, chance, set(with_room), high)
        reached(here, "all run", lambda: here.count_running(low) >= runs)
        up_seconds = time.monotonic() - began
        looks = [(0.0, costs())]
        started = time.monotonic()
        due, look_due, end = started, started + minutes * 60 / 6, started + minutes * 60
        while time.monotonic() < end:
            here.trainings.run_until(min(due, look_due, end))
            story.bring_back()
            if time.monotonic() >= look_due:
                look_due += minutes * 60 / 6
                looks.append((significant(time.monotonic() - started), costs()))
                say(f"{dict(story.counted)}, {here.count_running(low)} of {runs} run")
            if time.monotonic() >= due:
                due += fault_seconds
                story.strike()
        lasted = time.monotonic() - started
        ends = True
        everybody = len(here.sent)
        reached(here, "all have come to their end", lambda: len(here.trainings.results) >= everybody)
        reached(here, "all Workflows have succeeded", lambda: _succeeded(here) >= everybody, look=5.0)
        gaps = next_pod_seconds(here)
        return {
            "settings": {"runs": runs, "minutes": minutes, "fault_seconds": fault_seconds, "seed": seed},
            "seconds": {"all_up": significant(up_seconds), "hour": significant(lasted)},
            "faults": dict(story.counted),
            "next_pod_seconds": {
                why: {"n": len(found), **{f"p{q}": significant(percentile(found, q)) for q in (50, 99)}}
                for why, found in gaps.items()
            },
            **_outcome(here, everybody),
            "costs": {f"{at:g}": found for at, found in looks},
        }


def next_pod_seconds(here: Fleet) -> dict[str, list[float]]:
    """From the end of each pod to the creation of the next one of its run, by what ended it."""
    gaps: dict[str, list[float]] = {}
    for run in here.sent:
        pods = here.attempts_of(run)
        for before, after in pairwise(pods):
            if before.ended is not None:
                gaps.setdefault(before.why or FOR_ANOTHER, []).append(after.created - before.ended)
    return gaps


def reached(here: Fleet, what: str, is_reached: Any, look: float = 0.0) -> None:
    """Let the programs run until then; ``look`` seconds between two looks at the API server."""
    said, looked, found = time.monotonic(), 0.0, False

    def check() -> bool:
        nonlocal said, looked, found
        now = time.monotonic()
        if now - looked >= look:
            found, looked = is_reached(), now
        if not found and now - said > _LOOK_SECONDS:
            said = now
            say(f"{len(here.trainings.running)} programs run, {here.trainings.commits} commits; until {what}")
        return found

    if not here.trainings.until(check, _PATIENCE_SECONDS):
        raise RuntimeError(f"not in {_PATIENCE_SECONDS:.0f} s: {what}")
    say(what)


class _Command:
    """A command of ``tiphys`` that runs beside the programs."""

    def __init__(self, arguments: list[str]) -> None:
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            ["tiphys", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.seconds = 0.0

    def check(self) -> None:
        """Wait for its end.

        Raises:
            RuntimeError: it failed.
        """
        said, _ = self._process.communicate(timeout=_PATIENCE_SECONDS)
        self.seconds = time.monotonic() - self._began
        if self._process.returncode:
            raise RuntimeError(f"tiphys recover ended with {self._process.returncode}: {said[-2000:]}")


def restore_node(here: Fleet, name: str) -> None:
    """The node that was lost, as a new one."""
    here.api.create(NODES, None, manifest(Group(NODE_GROUP, 1, GPUS, "A100"), name))


def _succeeded(here: Fleet) -> int:
    return sum(1 for phase in here.phases().values() if phase == "Succeeded")


def _this_cluster(settings: Settings) -> str:
    said = tiphys("recover", "--store", settings.store, "-n", settings.namespace)
    return next(word.rstrip(":") for word in said.split() if word.startswith("kubernetes:"))


def _outcome(here: Fleet, runs: int) -> dict[str, Any]:
    trainings = here.trainings
    pods: list[PodSeen] = list(here.pods.seen.values())
    return {
        "acknowledged": trainings.commits,
        "pods": len(pods),
        "ended_as_undisturbed": sum(trainings.results.values()),
        "of": runs,
        "must_not_happen": dict(trainings.faults),
    }
