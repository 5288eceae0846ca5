"""Plans and resumes runs from storage alone."""

from tiphys_controller.plan.drift import DriftFinding, format_drift
from tiphys_controller.runs import RunDetail, RunPhase, RunSummary, describe_run, list_run_summaries
from tiphys_controller.submit.fork import ForkResult, fork_run
from tiphys_controller.submit.idempotency import start_run_once
from tiphys_controller.submit.plan_report import API_VERSION, ItemReport, PlanReport, StepReport, plan_run
from tiphys_controller.submit.planner import WorkflowChange
from tiphys_controller.submit.resume import ResumeResult, resume_run
from tiphys_controller.submit.start import StartResult, start_run
from tiphys_controller.submit.submission import locate_workflow
from tiphys_controller.submit.submitter import (
    ADDRESS_PREFIX,
    ClusterSubmitter,
    LiveWorkflow,
    ShutdownStrategy,
    Submitter,
    TenantSubmitter,
    is_stable_cluster_name,
)

__all__ = [
    "ADDRESS_PREFIX",
    "API_VERSION",
    "ClusterSubmitter",
    "DriftFinding",
    "ForkResult",
    "ItemReport",
    "LiveWorkflow",
    "PlanReport",
    "ResumeResult",
    "RunDetail",
    "RunPhase",
    "RunSummary",
    "ShutdownStrategy",
    "StartResult",
    "StepReport",
    "Submitter",
    "TenantSubmitter",
    "WorkflowChange",
    "describe_run",
    "fork_run",
    "format_drift",
    "is_stable_cluster_name",
    "list_run_summaries",
    "locate_workflow",
    "plan_run",
    "resume_run",
    "start_run",
    "start_run_once",
]
