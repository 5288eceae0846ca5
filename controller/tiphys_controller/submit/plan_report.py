"""The plan as a stable document for people and scripts.

Its types are separate from those of the decision, so that the decision can
change without breaking the output.
"""

from typing import Literal

from pydantic import ConfigDict, Field

from tiphys.records import Record, Timestamp
from tiphys_controller.plan.decide import TaskPlan
from tiphys_controller.plan.drift import DriftFinding
from tiphys_controller.submit.planner import RunPlan

API_VERSION = "tiphys.dev/v1beta1"


class OutputDocument(Record):
    """A document that the CLI prints as JSON or YAML, in the form of a Kubernetes object."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True, validate_by_alias=True)

    api_version: str = Field(API_VERSION, alias="apiVersion")


class StartCheckpoint(Record):
    """Where a training would go on. ``checkpoint`` is its name, ``attempt-step``; empty for the beginning."""

    checkpoint: str = ""
    global_step: int = 0
    committed_at: Timestamp | None = None
    is_end: bool = Field(default=False, exclude=True)
    """Whether the training had finished, so that it goes on from its end."""


class ItemReport(Record):
    """One item of a fan-out. ``item`` is its value; empty where only its step id is known."""

    step: str
    name: str = ""
    """Its name for people, such as ``fit[2]``."""
    item: str
    done: bool
    reason: str
    starts_from: StartCheckpoint | None = Field(default=None, exclude_if=lambda start: start is None)


class StepReport(Record):
    """The decision on one task of the entry DAG."""

    name: str
    kind: Literal["step", "train", "plain"]
    decision: Literal["skip", "run"]
    reason: str
    needs: tuple[str, ...] = Field(default=(), exclude_if=lambda needs: not needs)
    """Names of the tasks that must end before it starts, sorted."""
    items: tuple[ItemReport, ...] = ()
    starts_from: StartCheckpoint | None = Field(default=None, exclude_if=lambda start: start is None)
    """None for a step that does not train, keeps its checkpoints on a volume, or does not run."""


class PlanRefusal(Record):
    """Why a resume of the run will be refused."""

    message: str
    exit_code: int
    """Exit code of ``tiphys resume``."""


class PlanReport(OutputDocument):
    """Which steps would run, with the reasons."""

    kind: Literal["Plan"] = "Plan"
    run: str
    pipeline: str
    store: str
    submissions: int
    steps: tuple[StepReport, ...]
    rerun: tuple[str, ...] = Field(default=(), exclude_if=lambda rerun: not rerun)
    """Steps that are asked to run again, from the beginning."""
    drift: tuple[DriftFinding, ...] = Field(default=(), exclude_if=lambda drift: not drift)
    """Differences of a changed Workflow from that of the last submission."""
    refusal: PlanRefusal | None = Field(default=None, exclude_if=lambda refusal: refusal is None)
    """None where nothing in storage is in the way of a resume."""
    seconds: float
    """Time to plan, storage included."""

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the steps that would run."""
        return tuple(step.name for step in self.steps if step.decision == "run")


def build_plan_report(run_plan: RunPlan, url: str) -> PlanReport:
    """Build the document of a plan; ``url`` is that of the store."""
    return PlanReport(
        run=run_plan.state.record.run,
        pipeline=run_plan.pipeline.name,
        store=url,
        submissions=len(run_plan.state.submissions),
        steps=tuple(_step_report(run_plan, task) for task in run_plan.decisions.tasks),
        rerun=run_plan.rerun_steps,
        drift=run_plan.drift,
        seconds=run_plan.seconds,
    )


def _step_report(run_plan: RunPlan, task: TaskPlan) -> StepReport:
    spec = run_plan.pipeline.steps.get(task.name)
    return StepReport(
        name=task.name,
        kind=spec.kind.value if spec else "plain",
        decision=task.action.value,
        reason=task.reason,
        needs=tuple(sorted(run_plan.graph.tasks[task.name].needs)),
        items=tuple(
            ItemReport(
                step=item.step,
                name=run_plan.names.name(item.step),
                item=item.item,
                done=item.state.is_done,
                reason=item.state.reason,
            )
            for item in task.items
        ),
    )
