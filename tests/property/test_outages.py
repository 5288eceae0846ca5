"""Workflows under outages of storage, service, API server and ledger, on a clock that only the test moves.

Each trial draws four outages of 1 s to 10 min that begin at any moment, also in the middle of a call. Two replicas of
the service answer in turn behind one sidecar, or one shared agent calls them. Storage, API server or ledger that is
away fails each access; a service that is away takes no call, and loses the answers of those that it has taken.

The oracle: no node fails and no message is raw JSON, each attempt ends once and as it should, the submission ends as
Succeeded, and a trial without outages says the same.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from support.builders.ledger import queues
from support.builders.seeds import SEED
from support.stories.plugin import Flow, World, commit, fit, gpus, outputs, prep, workflow
from tiphys_plugin import DirectoryCluster, PluginCore, PluginSettings, SqliteLedger
from tiphys_plugin.agent.plugin_calls import call_core
from tiphys_plugin.agent.settings import AgentSettings
from tiphys_plugin.agent.task_sets import TaskSet
from tiphys_plugin.sidecar.forwarding import ServiceClient, SidecarReply, _reply_for_status, error_reply
from tiphys_plugin.sidecar.outages import OutageClock
from tiphys_plugin.sidecar.settings import SidecarSettings

from tiphys.errors import StoreError
from tiphys.protocol.execute_api import ExecuteReply
from tiphys.records import AttemptEndOutcome
from tiphys.store import DirectoryStore, read_step_attempts, read_submissions

RUN = "laeufe.v1-3"
KINDS = ("store", "service", "api server", "ledger")
TRIALS = 16
_STORE = ("create", "create_from_file", "read", "chunks", "list", "prefixes", "delete")
_CLUSTER = ("workflow", "workflow_summary", "pods", "attempt_pods", "delete_pod", "gang")
_LEDGER = ("request", "restore", "withdraw", "release", "release_workflow", "release_dead_leases", "snapshot")


@dataclass
class Weather:
    """The outages of a trial, by the seconds since its start; each access takes some milliseconds."""

    outages: list[tuple[str, float, float]]
    random: random.Random
    now: float = 0.0
    met: Counter[str] = field(default_factory=Counter)

    def is_away(self, kind: str) -> bool:
        self.now += self.random.uniform(0.001, 0.05)
        away = any(begin <= self.now < end for name, begin, end in self.outages if name == kind)
        self.met[kind] += away
        return away

    def utc(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.now)


def exposed(target: Any, kind: str, methods: tuple[str, ...], weather: Weather) -> Any:
    """``target`` with methods that fail while ``kind`` is away."""

    class Exposed(type(target)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in methods and weather.is_away(kind):

                def fail(*_: Any, **__: Any) -> Any:
                    raise StoreError(f"the {kind} did not answer: connection refused")

                return fail
            return super().__getattribute__(name)

    target.__class__ = Exposed
    return target


class Trial:
    """Two replicas of the service, and Argo's agent with a sidecar or the shared agent in front of them."""

    def __init__(self, root: Path, seed: int, shared_agent: bool, outages: int = 4) -> None:
        draw = random.Random(seed)
        begins = [(draw.choice(KINDS), draw.uniform(0, 150), draw.choice((1, 8, 45, 120, 600))) for _ in range(outages)]
        self.weather = Weather([(kind, begin, begin + length) for kind, begin, length in begins], draw)
        store, cluster = DirectoryStore(root / "store"), DirectoryCluster(root / "cluster")
        ledger = SqliteLedger(root / "ledger.db", queues(research={"A100": 8}), clock=self.weather.utc)
        settings = PluginSettings(verify_inline_seconds=60.0)

        def replica(weather: Weather) -> PluginCore:
            return PluginCore(
                exposed(DirectoryStore(root / "store"), "store", _STORE, weather),
                exposed(DirectoryCluster(root / "cluster"), "api server", _CLUSTER, weather),
                exposed(
                    SqliteLedger(root / "ledger.db", queues(research={"A100": 8}), clock=self.weather.utc),
                    "ledger",
                    _LEDGER,
                    weather,
                ),
                self.weather.utc,
                settings,
            )

        self._outages, self.weather.outages = self.weather.outages, []
        self._cores = [replica(self.weather), replica(self.weather)]  # they start before the first outage
        self.weather.outages, self.weather.now = self._outages, 0.0
        self._turns = cycle(self._cores)
        here = World(root, store, cluster, ledger, self._cores[0], self.weather, lambda: self._cores[0])  # type: ignore[arg-type]
        specs = [prep(), fit(gpu=gpus(4))]
        cluster.write_workflow(workflow(specs, RUN))
        self.flow = Flow(here, RUN, "uid-1", specs=tuple(specs))
        self.messages: list[str] = []
        self._failures: Counter[str] = Counter()
        self._agent_outages = OutageClock(monotonic=lambda: self.weather.now)
        self._sidecar = ServiceClient(SidecarSettings.from_environment({"TIPHYS_SERVICE_URL": "http://plugin:7243"}))
        self._sidecar._outages = OutageClock(monotonic=lambda: self.weather.now)
        self._sidecar._call = self._post  # type: ignore[method-assign]
        self._ask = self._ask_agent if shared_agent else self._ask_sidecar

    def close(self) -> None:
        for core in self._cores:
            core.close()
            core._context.ledger.close()  # type: ignore[attr-defined]
        self.flow.world.ledger.close()

    def call(self, body: dict[str, Any]) -> ExecuteReply:
        """The final reply to a node, after as many calls as it takes."""
        document = self.flow.document(body)
        for _ in range(5000):
            reply, pause = self._ask(document)
            assert reply.node is not None
            self.messages.append(reply.message)
            if reply.phase != "Pending":
                return reply
            self.weather.now += pause
        raise AssertionError(f"{body['node']} is Pending for ever: {self.messages[-1]}")

    def _execute(self, document: dict[str, Any]) -> ExecuteReply:
        if self.weather.is_away("service"):
            raise StoreError("the plugin's service http://plugin:7243 cannot be reached: connection refused")
        reply = next(self._turns).execute_document(document)
        if self.weather.is_away("service"):
            raise StoreError("the plugin's service http://plugin:7243 cannot be reached: connection reset")
        return reply

    def _post(self, body: bytes) -> SidecarReply:
        try:
            return SidecarReply(200, json.dumps(self._execute(json.loads(body)).to_json()).encode())
        except StoreError as error:
            if "service" in str(error):
                return error_reply(503, str(error))
            return _reply_for_status("http://plugin:7243", 503, json.dumps({"error": str(error)}).encode())

    def _ask_sidecar(self, document: dict[str, Any]) -> tuple[ExecuteReply, float]:
        answer = self._sidecar.forward(json.dumps(document).encode(), document)
        assert answer.status == 200
        reply = ExecuteReply.model_validate_json(answer.body)
        return reply, float(reply.requeue.removesuffix("s")) if reply.requeue else 0.0

    def _ask_agent(self, document: dict[str, Any]) -> tuple[ExecuteReply, float]:
        template, node = document["template"], document["template"]["plugin"]["tiphys"]["node"]
        task_set = TaskSet("ml", RUN, "ts-1", 1, "uid-1", {}, {})
        result = call_core(
            lambda _, request: self._execute(request),
            task_set,
            template,
            self._failures[node],
            AgentSettings(),
            self._agent_outages,
        )
        self._failures[node] = self._failures[node] + 1 if result.failed else 0
        return ExecuteReply.model_validate({"node": result.entry}), result.repeat_in_seconds or 0.0


def run_pipeline(trial: Trial) -> Iterator[str]:
    """Run prep, and fit with one preemption; yields the phase of each node."""
    flow, pause = trial.flow, trial.weather.random.uniform
    admitted = trial.call(flow.body("admit", "prep"))
    yield f"prep.admit {admitted.phase} {outputs(admitted)['run']}"
    flow.write_output(admitted, "0/artifacts/data", b"rows")
    flow.write_output(admitted, "0/parameters/rows", b"3")
    flow.pod("prep", 1, None, phase="Succeeded", exit_code=0)
    trial.weather.now += pause(0, 60)
    yield f"prep.conclude {trial.call(flow.body('conclude', 'prep', status='Succeeded', exit_code='0')).phase}"
    for retry, code in ((0, 75), (1, 0)):
        admitted = trial.call(flow.body("admit", "fit", retry))
        yield f"fit.{retry}.admit {admitted.phase} {outputs(admitted)['run']}"
        trial.weather.now += pause(0, 60)
        commit(flow.world.store, f"{RUN}/fit", retry + 1, 7 + retry)
        if code == 0:
            flow.write_output(admitted, "artifacts/model", b"weights")
        phase = "Succeeded" if code == 0 else "Failed"
        flow.pod("fit", retry + 1, retry, phase=phase, exit_code=code)
        ended = trial.call(flow.body("conclude", "fit", retry, status=phase, exit_code=str(code)))
        yield f"fit.{retry}.conclude {ended.phase}"
    node = {"op": "finalize", "node": f"{RUN}.onExit", "status": "Succeeded", "failures": '"null"'}
    yield f"finalize {trial.call(node).phase}"


HEALTHY = [
    "prep.admit Succeeded true",
    "prep.conclude Succeeded",
    "fit.0.admit Succeeded true",
    "fit.0.conclude Error",  # "try again"
    "fit.1.admit Succeeded true",
    "fit.1.conclude Succeeded",
    "finalize Succeeded",
]


def check_records(trial: Trial) -> None:
    store = trial.flow.world.store
    [submission] = read_submissions(store, RUN)
    assert submission.end is not None and submission.end.status == "Succeeded"
    for step, expected in (
        ("prep", [AttemptEndOutcome.DONE]),
        ("fit", [AttemptEndOutcome.FAILED, AttemptEndOutcome.DONE]),
    ):
        attempts = read_step_attempts(store, RUN, step)
        assert [attempt.end and attempt.end.outcome for attempt in attempts] == expected
    assert not trial.flow.world.ledger.snapshot().leases
    assert not [message for message in trial.messages if message.lstrip().startswith("{")]


@pytest.mark.parametrize("shared_agent", [False, True], ids=["sidecar", "shared agent"])
def test_workflow_without_outages_is_the_reference(tmp_path, shared_agent):
    trial = Trial(tmp_path, SEED, shared_agent, outages=0)
    try:
        assert list(run_pipeline(trial)) == HEALTHY, trial.messages[-3:]
        check_records(trial)
        assert not trial.weather.met.total()
    finally:
        trial.close()


@pytest.mark.parametrize("shared_agent", [False, True], ids=["sidecar", "shared agent"])
def test_no_workflow_fails_by_an_outage(tmp_path, shared_agent):
    met: Counter[str] = Counter()
    for number in range(TRIALS):
        trial = Trial(tmp_path / str(number), SEED + number, shared_agent)
        try:
            assert list(run_pipeline(trial)) == HEALTHY, (SEED + number, trial.messages[-1])
            check_records(trial)
            met += trial.weather.met
        finally:
            trial.close()
    assert set(met) == set(KINDS), "each kind of outage has to be met, or the trials show nothing"


def test_trials_notice_a_limit_that_is_too_short(tmp_path):
    failed = 0
    for number in range(10):
        trial = Trial(tmp_path / str(number), SEED + number, False)
        trial._sidecar._outages = OutageClock(20.0, lambda weather=trial.weather: weather.now)  # type: ignore[misc]
        try:
            failed += any(after != healthy for after, healthy in zip(run_pipeline(trial), HEALTHY, strict=False))
        except AssertionError:  # an attempt without outputs
            failed += 1
        finally:
            trial.close()
    assert failed > 2


@pytest.mark.parametrize("shared_agent", [False, True], ids=["sidecar", "shared agent"])
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("store", ("admit", "prep")),
        ("service", ("admit", "prep")),
        ("api server", ("admit", "prep")),
        ("ledger", ("admit", "fit", 0)),  # Argo does not retry Failed
    ],
)
def test_outage_beyond_the_limit_ends_the_wait_with_the_reason(tmp_path, kind, call, shared_agent):
    trial = Trial(tmp_path, SEED, shared_agent, outages=0)
    try:
        trial.weather.outages = [(kind, 0.0, 1e9)]
        reply = trial.call(trial.flow.body(*call))
        assert (reply.phase, trial.weather.now >= 1800) == ("Failed", True)
        assert reply.message.startswith("No answer for 30 min: ")
        assert f"{kind} " in reply.message
    finally:
        trial.close()
