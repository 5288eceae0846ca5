"""What an automatic resume, or its refusal, is told as: once for each run of each tenant."""

import pytest
from support.builders.argo_objects import workflow
from support.builders.irregular_samples import Irregular
from support.fakes.memory_store import MemoryStore
from tiphys_controller.auto_resume.act import ReconcileResult
from tiphys_controller.auto_resume.decide import AutoResumeAction, AutoResumeDecision
from tiphys_controller.auto_resume.state import AutomationMode, AutoResumeLimits, RunObservation, SubmissionStatus
from tiphys_controller.kubernetes.auto_resume_loop import TrackedRun
from tiphys_controller.kubernetes.events.auto_resume_events import AutoResumeRecorder
from tiphys_controller.kubernetes.events.messages import EventMessage
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.workflow_view import WorkflowView, build_workflow_view

from tiphys.errors import StoreError

TENANTS = ("ml", "vision-2")


class Writer:
    """Notes whose Workflow is told what."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []
        self.fails = False

    def record_event(self, found: WorkflowView, message: EventMessage) -> None:
        self.told.append((found.namespace, message.reason, message.message))
        if self.fails:
            raise StoreError("no answer")


@pytest.fixture
def writer() -> Writer:
    return Writer()


def recorder_of(writer: Writer, mode: AutomationMode = AutomationMode.ON) -> AutoResumeRecorder:
    stores = {namespace: MemoryStore(url=f"s3://{namespace}") for namespace in TENANTS}
    limits = AutoResumeLimits(mode=mode)
    return AutoResumeRecorder(writer, stores.__getitem__, ControllerMetrics(), limits, lambda: 0.0)  # type: ignore[arg-type]


def tracked(namespace: str, run: str) -> TrackedRun:
    return TrackedRun((namespace, run), workflow=build_workflow_view(workflow(run, namespace=namespace, run=run)))


def decided(action: AutoResumeAction, reason: str, run: str, submission: int = 3) -> ReconcileResult:
    observation = RunObservation(run, submission, SubmissionStatus.FAILED)
    return ReconcileResult(AutoResumeDecision(action, reason, "why é"), observation)


def test_runs_of_all_tenants_are_told_once_how_to_resume_them(writer: Writer) -> None:
    first, second = Irregular().run_names(2)
    recorder = recorder_of(writer)
    for _ in range(2):
        for namespace, run in [(TENANTS[0], first), (TENANTS[1], first), (TENANTS[0], second)]:
            result = decided(AutoResumeAction.LEAVE_ALONE, "BreakerOpen", run)
            recorder.report_result(tracked(namespace, run), result)
    assert writer.told == [
        (
            namespace,
            "AutoResumeBreakerOpen",
            f"not resumed automatically: why é; `tiphys resume {run} --store s3://{namespace}` resumes it now",
        )
        for namespace, run in [(TENANTS[0], first), (TENANTS[1], first), (TENANTS[0], second)]
    ]
    declined = recorder.metrics.registry.get_sample_value(
        "tiphys_controller_resumes_declined_total", {"reason": "BreakerOpen"}
    )
    assert declined == 6


def test_new_reasons_and_submissions_are_told_too(writer: Writer) -> None:
    [run] = Irregular().run_names(1)
    recorder = recorder_of(writer)
    for reason, submission in [("BreakerOpen", 3), ("CoolingDown", 3), ("BreakerOpen", 4), ("CoolingDown", 3)]:
        recorder.report_result(tracked("ml", run), decided(AutoResumeAction.LEAVE_ALONE, reason, run, submission))
    assert [reason for _, reason, _ in writer.told] == [
        *("AutoResumeBreakerOpen", "AutoResumeCoolingDown", "AutoResumeBreakerOpen")
    ]


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        (AutomationMode.ON, []),
        (AutomationMode.DRY_RUN, ["dry run: would resume automatically as submission 4: why é"]),
    ],
)
def test_a_resume_that_was_not_made_is_told_in_a_dry_run_alone(
    mode: AutomationMode, told: list[str], writer: Writer
) -> None:
    [run] = Irregular().run_names(1)
    recorder_of(writer, mode).report_result(tracked("ml", run), decided(AutoResumeAction.RESUME, "Failed", run))
    assert [message for _, _, message in writer.told] == told


def test_an_event_that_fails_stops_nothing(writer: Writer) -> None:
    [run] = Irregular().run_names(1)
    writer.fails = True
    recorder_of(writer).report_result(tracked("ml", run), decided(AutoResumeAction.LEAVE_ALONE, "BreakerOpen", run))
    assert len(writer.told) == 1
