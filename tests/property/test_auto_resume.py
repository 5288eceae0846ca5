"""Whatever fails, dies and comes back in whatever order: a run has one Workflow at a time, and never too many.

Three controllers share a store and a cluster. Any of them may die at any named
point, and begin again knowing nothing.
"""

from contextlib import suppress
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.builders.lineage import START_TIMES
from support.fakes.memory_store import MemoryStore
from support.processes.failpoints import dying_at
from tiphys_controller import LiveWorkflow, resume_run, start_run
from tiphys_controller.auto_resume.act import AutoResumeReconciler
from tiphys_controller.auto_resume.observation_health import ObservationHealth
from tiphys_controller.auto_resume.state import AutoResumeLimits
from tiphys_controller.submit.submission import bind_submission

from tiphys.errors import ConflictError, TiphysError
from tiphys.protocol.auto_resume_policy import AUTO_RESUME_ANNOTATION, AutoResumePolicy
from tiphys.records import Cause, CheckpointManifest
from tiphys.store import LineageLayout, read_submissions

RUN = "digits-1"
POLICY = AutoResumePolicy(max_without_progress=2, retry_after_seconds=None)
POINTS = ("automatic.after_intent", "resume.after_fence", "resume.after_claim", "resume.after_create")
MANIFEST = pipeline_of(gated("fit"))
MANIFEST["metadata"]["annotations"][AUTO_RESUME_ANNOTATION] = POLICY.model_dump_json()


class PointNotReachedError(Exception):
    """The controller had nothing to do that leads to the point at which it should die."""


class MemoryCluster:
    """Workflows by name; a name is never used twice, though its object may be deleted."""

    cluster = "west"

    def __init__(self) -> None:
        self.live: dict[str, LiveWorkflow] = {}
        self.made: list[str] = []

    def find(self, namespace: str, name: str) -> LiveWorkflow | None:
        return self.live.get(name)

    def read(self, namespace: str, name: str) -> dict[str, Any] | None:
        """None: its steps have a gate, so that nothing is read from a Workflow."""
        return None

    def create(self, manifest: dict[str, Any]) -> LiveWorkflow:
        name = manifest["metadata"]["name"]
        if name in self.live:
            raise ConflictError(f"a Workflow {name} exists")
        self.made.append(name)
        self.live[name] = LiveWorkflow(name, "default", f"uid-of-{name}", "Running", True)
        return self.live[name]


class Runs(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.store, self.cluster, self.now = MemoryStore(), MemoryCluster(), 0.0
        start_run(self.store, self.cluster, MANIFEST, RUN)  # type: ignore[arg-type]
        self.desks = [self._attendant() for _ in range(3)]
        self.step, self.attempt, self.fruitless = 0, 0, 0
        self.by_person = 0

    def _attendant(self) -> AutoResumeReconciler:
        surroundings: Any = (lambda _: self.store, lambda: self.cluster, lambda: True, lambda _: ObservationHealth())
        limits = AutoResumeLimits(resumes_per_minute=60_000.0)
        return AutoResumeReconciler(*surroundings, monotonic=lambda: self.now, limits=limits)

    def _newest(self) -> str:
        return self.cluster.made[-1]

    def _runs(self) -> bool:
        found = self.cluster.live.get(self._newest())
        return found is not None and found.running

    @rule(who=st.integers(0, 2))
    def attend(self, who: int) -> None:
        self._attend(who)

    @precondition(_runs)
    @rule(who=st.integers(0, 2), seconds=st.sampled_from([0.0, 4000.0]))
    def it_fails_and_somebody_attends(self, who: int, seconds: float) -> None:
        self.workflow_ends("fails")
        self._attend(who)
        self.now += seconds
        self._attend(who)

    @rule(who=st.integers(0, 2), point=st.sampled_from(POINTS))
    def attend_and_die(self, who: int, point: str) -> None:
        with suppress(PointNotReachedError), dying_at(point):
            self._attend(who)
            raise PointNotReachedError
        self.desks[who] = self._attendant()

    def _attend(self, who: int) -> None:
        before = len(self.cluster.made)
        try:
            with suppress(ConflictError):
                self.desks[who].reconcile(("default", RUN))
        finally:
            self.fruitless += len(self.cluster.made) - before

    @precondition(_runs)
    @rule(how=st.sampled_from(["fails", "is deleted"]))
    def workflow_ends(self, how: str) -> None:
        name, number = self._newest(), len(self.cluster.made)
        last = read_submissions(self.store, RUN)[-1].claim
        bind_submission(
            self.store, "west", last, self.cluster.live[name]
        )  # as its first admit does, if nobody was faster
        self.attempt += 1
        History(self.store, RUN).failed("fit", self.attempt, Cause.PREEMPTION, "", number)
        if how == "fails":
            self.cluster.live[name] = self.cluster.live[name]._replace(phase="Failed", running=False)
        else:
            del self.cluster.live[name]

    @precondition(_runs)
    @rule()
    def a_checkpoint_is_committed(self) -> None:
        self.step, self.fruitless = self.step + 1, 0
        manifest = CheckpointManifest(
            run=RUN,
            step="fit",
            lineage=f"{RUN}/fit",
            attempt=self.attempt + 1,
            global_step=self.step,
            shards=(),
            began=START_TIMES,
        )
        self.store.create(LineageLayout(f"{RUN}/fit").manifest(self.attempt + 1, self.step), manifest.to_bytes())

    @rule(seconds=st.sampled_from([1.0, 70.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def a_person_resumes(self) -> None:
        before = len(self.cluster.made)
        with suppress(TiphysError):
            resume_run(self.store, self.cluster, RUN)  # type: ignore[arg-type]
        if len(self.cluster.made) > before:
            self.fruitless = 0
            self.by_person += 1

    @invariant()
    def one_workflow_at_a_time(self) -> None:
        assert len(set(self.cluster.made)) == len(self.cluster.made), self.cluster.made
        assert sum(one.running for one in self.cluster.live.values()) <= 1

    @invariant()
    def numbers_have_no_gaps(self) -> None:
        numbers = [one.claim.submission for one in read_submissions(self.store, RUN)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) - len(self.cluster.made) in (0, 1), "a claim that was not sent is sent before the next"

    @invariant()
    def a_run_that_gets_no_further_is_given_up(self) -> None:
        assert self.fruitless <= POLICY.max_without_progress + 1, self.cluster.made


TestRuns = Runs.TestCase
TestRuns.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
