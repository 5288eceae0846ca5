"""A plan for people and scripts: a stable document, apart from the types that make the decision."""

from collections.abc import Sequence
from typing import Literal

from pydantic import ConfigDict, Field

from tiphys.records import Record
from tiphys.store import Store
from tiphys_controller.plan.decide import TaskPlan
from tiphys_controller.plan.drift import Difference
from tiphys_controller.submit.planner import Planned, planned

API_VERSION = "tiphys.dev/v1alpha1"


class Document(Record):
    """Something that the command prints as JSON or YAML, in the form of a Kubernetes object."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True, validate_by_alias=True)

    api_version: str = Field(API_VERSION, alias="apiVersion")


class ItemReport(Record):
    """One item of a fan-out. ``item`` is its value; empty where only its step id is known."""

    step: str
    item: str
    done: bool
    reason: str


class StepReport(Record):
    """The decision on one task of the entry DAG."""

    name: str
    kind: Literal["step", "train", "plain"]
    decision: Literal["skip", "run"]
    reason: str
    items: tuple[ItemReport, ...] = ()


class PlanReport(Document):
    """What would run, and why, and what it took to find out."""

    kind: Literal["Plan"] = "Plan"
    run: str
    pipeline: str
    store: str
    submissions: int
    steps: tuple[StepReport, ...]
    drift: tuple[Difference, ...] = Field(default=(), exclude_if=lambda drift: not drift)
    """What differs from the last submission, where something else shall go on."""
    requests: int
    """Requests to storage; a listing counts as one."""
    seconds: float

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the steps that would run."""
        return tuple(step.name for step in self.steps if step.decision == "run")


def plan_run(store: Store, run: str, again: Sequence[str] = ()) -> PlanReport:
    """Plan a run and write nothing. ``again`` are steps that shall run again although they are done.

    Raises:
        NotFoundError: there is no such run.
        UsageError: Tiphys did not compile its Workflow, or it has no such step.
        IntegrityError: a record is damaged.
    """
    return report_of(planned(store, run, again), store.url)


def report_of(found: Planned, url: str) -> PlanReport:
    """The document for a plan; ``url`` is the store's."""
    return PlanReport(
        run=found.state.record.run,
        pipeline=found.pipeline.name,
        store=url,
        submissions=len(found.state.submissions),
        steps=tuple(_step(found, task) for task in found.plan.tasks),
        drift=found.drift,
        requests=found.state.requests,
        seconds=found.seconds,
    )


def _step(found: Planned, task: TaskPlan) -> StepReport:
    spec = found.pipeline.steps.get(task.name)
    return StepReport(
        name=task.name,
        kind=spec.kind.value if spec else "plain",
        decision=task.action.value,
        reason=task.reason,
        items=tuple(
            ItemReport(step=one.step, item=one.item, done=one.verdict.done, reason=one.verdict.reason)
            for one in task.items
        ),
    )
