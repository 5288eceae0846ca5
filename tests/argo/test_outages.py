"""Outages of storage, the service and the API server, of 1 s to 10 min, while Workflows run: none of them fails.

Workflows are in flight all the time; a new one is submitted for each that ends. One part after another goes away, at
moments and for times that `support.builders.seeds` draws. A Workflow that was in flight during an outage is a try.
Each must succeed with the result of an undisturbed run, by one submission, with one finished attempt of each step.

The ledger lives in the API server, so it is away with it. Without `TIPHYS_ARGO_OUTAGES` there are three short outages.
"""

import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle

import pytest
from support.builders.seeds import SEED
from support.stories.interrupted_training.pipelines import pair, story

from tiphys.errors import StoreError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.store import read_submissions

from .outcomes import STORY, check_nothing_lost_or_twice
from .world import FINISHED, Workflow, World

PARTS = ("S3", "PLUGIN", "APISERVER")
TRIES = int(os.environ.get("TIPHYS_ARGO_OUTAGES", "0"))
"""Workflows that have to meet an outage; 200 take an hour. 0: three outages of at most 20 s."""
AT_ONCE = 12 if TRIES else 4
LONGEST_SECONDS = 600.0 if TRIES else 20.0
PAUSE_SECONDS = (5.0, 40.0)
STEPS = 10
_POLL_SECONDS = 1.0


@dataclass
class Flight:
    """A Workflow, and the outages that it met."""

    workflow: Workflow
    kind: str
    met: list[str] = field(default_factory=list)


@dataclass
class Campaign:
    """Keeps Workflows in flight; those that ended are in ``ended``."""

    world: World
    kinds: Iterator[str]
    flying: list[Flight] = field(default_factory=list)
    ended: list[Flight] = field(default_factory=list)

    def fly_until(self, moment: float, met: str = "") -> None:
        """Until ``moment`` of the monotonic clock: note the ends, submit others, and write down what each one meets."""
        while time.monotonic() < moment:
            try:
                self._land()
                while len(self.flying) < AT_ONCE:
                    kind = next(self.kinds)
                    self.flying.append(Flight(self.world.submit(_pipeline(self.world, kind)), kind))
            except (StoreError, AssertionError):
                pass  # the API server is away: nothing can be submitted or read
            for flight in self.flying:
                if met and met not in flight.met:
                    flight.met.append(met)
            time.sleep(_POLL_SECONDS)

    def land_all(self) -> None:
        self.world.until(
            "all Workflows end", self._land, lambda: "\n".join(f.workflow.describe() for f in self.flying), 3
        )

    def _land(self) -> bool:
        for flight in list(self.flying):
            if flight.workflow.phase in FINISHED:
                self.flying.remove(flight)
                self.ended.append(flight)
        return not self.flying


def _pipeline(world: World, kind: str) -> Manifest:
    if kind == "pair":
        return pair(world.place, steps=STEPS, pause=0.5).compile()
    queue, _ = world.queue()
    gpus = {"training": {"gpus": 1, "queue": queue}} if kind == "gpus" else {}
    return story(world.place, steps=STEPS, pause=0.5, **gpus).compile()


def fault(flight: Flight) -> str:
    """What is wrong with a Workflow that ended; empty if nothing is."""
    workflow = flight.workflow
    if workflow.phase != "Succeeded":
        return workflow.describe()
    try:
        check_nothing_lost_or_twice(workflow, STEPS, ("preprocess", "train") if flight.kind == "pair" else STORY)
    except AssertionError as error:
        return f"{workflow.name}: {error}"
    [submission] = read_submissions(workflow.world.store, workflow.run)
    if submission.end is None:
        return f"{workflow.name}: the end of the run is not recorded"
    raw = [node for node in workflow.nodes() if node.message.lstrip().startswith(("{", "["))]
    return f"{workflow.name}: a message is JSON: {raw[0]}" if raw else ""


@pytest.mark.timeout(4 * 3600)
def test_no_workflow_fails_in_an_outage(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(SEED)
    campaign = Campaign(world, cycle(["plain", "gpus", "pair"]))
    campaign.fly_until(time.monotonic() + draw.uniform(*PAUSE_SECONDS))
    outages = 0
    while outages < len(PARTS) or sum(bool(flight.met) for flight in campaign.ended) < TRIES:
        part = PARTS[outages % len(PARTS)]
        seconds = math.exp(draw.uniform(0, math.log(LONGEST_SECONDS)))
        outages += 1
        with capsys.disabled():
            print(f"\n{part} is away for {seconds:.0f} s; {len(campaign.ended)} Workflows ended", flush=True)  # noqa: T201
        with world.away(part):
            campaign.fly_until(time.monotonic() + seconds, f"{part} for {seconds:.0f} s")
        campaign.fly_until(time.monotonic() + draw.uniform(*PAUSE_SECONDS))
    campaign.land_all()
    tried = [flight for flight in campaign.ended if flight.met]
    with capsys.disabled():
        print(f"{len(tried)} Workflows met {outages} outages (seed {SEED})")  # noqa: T201
    assert len(tried) >= max(1, TRIES), "no Workflow could be submitted, or none met an outage"
    assert [f"{flight.met}: {found}" for flight in tried if (found := fault(flight))] == []
