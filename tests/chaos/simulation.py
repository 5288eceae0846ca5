"""One simulation: hours of faults, then time to recover, then what is left for the checker."""

import json
import logging
import re
from dataclasses import dataclass
from typing import Any

import structlog

from chaos.argo import Argo
from chaos.cluster import ClusterState
from chaos.faults import FaultInjector
from chaos.scheduler import Process, Scheduler
from chaos.seams import simulated
from chaos.services import Controller, Desk, Replica
from chaos.world import World
from tiphys.protocol.compiled_workflow import is_shutdown_message

FAULT_SECONDS = 3 * 3600.0
RECOVERY_SECONDS = 3 * 3600.0
RUNS = 5
SHORT_RUNS = 3
"""Runs of a simulation with no more than an hour of faults."""
_START_WITHIN_SECONDS = 1.5 * 3600.0


@dataclass(frozen=True)
class Outcome:
    """What a simulation leaves. ``crashes`` are errors that no actor should have raised."""

    seed: int
    history: list[dict[str, Any]]
    objects: dict[str, bytes]
    digest: str
    """Digest of all decisions of the scheduler and of the history."""
    seconds: float
    """Virtual time that has passed."""
    switches: int
    crashes: list[tuple[str, BaseException]]
    is_settled: bool
    """Whether every run came to its end in the time to recover."""


def simulate(seed: int, fault_seconds: float = FAULT_SECONDS) -> Outcome:
    """Run the simulation of ``seed``; the same seed gives the same outcome."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    scheduler, runs = Scheduler(seed), RUNS if fault_seconds > 3600 else SHORT_RUNS
    with simulated(scheduler):
        world, state = World(scheduler), ClusterState()
        desk = Desk(world, state)
        replicas = [Replica(world, state, number) for number in (1, 2)]
        controllers = [Controller(world, state, number) for number in (1, 2)]
        argo = Argo(world, state, replicas)
        keys = [f"nightly-{number}" for number in range(runs)]
        faults = FaultInjector(world, state, argo, replicas, controllers, desk, keys)
        world.record("settings", seed=seed, keys=keys)
        within = world.random.choice((60.0, min(_START_WITHIN_SECONDS, fault_seconds / 2)))  # all at once, or not
        for key in keys:
            delay = world.random.uniform(0, within)
            desk.start(key, delay)
            desk.start(key, delay + world.random.choice((0.0, 0.05, 5.0)))  # the request is sent twice
        scheduler.spawn(faults.process, "faults", faults.run)
        scheduler.spawn(faults.process, "visits", faults.visit)
        scheduler.run_until(lambda: False, fault_seconds)
        faults.is_over = True
        world.faults.clear()
        people = Process("people")

        def recover() -> None:
            """People ask for what has not come to its end, now that nothing fails any more."""
            while len(statuses := _last_statuses(world)) < runs or set(statuses.values()) != {"Succeeded"}:
                for key in keys:
                    if key not in desk.answered:
                        desk.start(key)
                for run, status in statuses.items():
                    if status != "Succeeded":
                        desk.resume(run)
                scheduler.sleep(300.0)
            scheduler.wait_for(
                lambda: not any(pod.process.is_alive and not pod.has_ended for pod in argo.pods.values())
            )
            scheduler.sleep(1900.0)  # programs on nodes that were cut off are ended by now
            for _ in range(2):
                for run in statuses:
                    collection = desk.collect(run)
                    scheduler.wait_for(lambda collection=collection: collection.has_ended)  # type: ignore[misc]
                scheduler.sleep(200.0)

        actor = scheduler.spawn(people, "recovery", recover)
        settled = scheduler.run_until(lambda: actor.has_ended, fault_seconds + RECOVERY_SECONDS)
        world.record("over", settled=settled)
        seconds, switches, crashes = scheduler.now, scheduler.switches, list(scheduler.crashes)
        history, objects = list(world.history), {key: data for key, (data, _) in world.objects.items()}
        digest = scheduler.digest
        scheduler.close()
    return Outcome(seed, history, objects, digest, seconds, switches, crashes, settled)


def _last_statuses(world: World) -> dict[str, str]:
    """The recorded status of the last submission of each run; empty without an end.

    One that was stopped when its steps were done counts as succeeded: people find nothing missing.
    """
    claims = (
        re.fullmatch(r"control/runs/([^/]+)/submissions/\d{9}", key[:-5]) for key in world.keys_below("control/runs/")
    )
    last = {claim[1]: claim[0] for claim in claims if claim}
    ends = {run: world.objects.get(f"{claim}.end.json") for run, claim in last.items()}
    statuses = {run: json.loads(end[0]) if end else {"status": ""} for run, end in ends.items()}
    return {run: "Succeeded" if _is_complete(world, run, end) else end["status"] for run, end in statuses.items()}


def _is_complete(world: World, run: str, end: dict[str, str]) -> bool:
    done = {key.split("/")[4] for key in world.keys_below(f"control/runs/{run}/done/")}
    return is_shutdown_message(end.get("message", "")) and done == {"prep", "fit"}
