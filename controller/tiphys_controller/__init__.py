"""Plans and resumes runs from storage alone.

Names are imported on first use (PEP 562): a command that reads one run would
otherwise load all that resumes and forks need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiphys_controller.plan.drift import DriftFinding, format_drift
    from tiphys_controller.run_phase import RunPhase
    from tiphys_controller.run_search import list_run_summaries
    from tiphys_controller.runs import RunDetail, RunSummary, describe_run
    from tiphys_controller.submit.fork import ForkResult, fork_run
    from tiphys_controller.submit.plan_report import (
        API_VERSION,
        ItemReport,
        PlanReport,
        StartCheckpoint,
        StepReport,
    )
    from tiphys_controller.submit.planner import WorkflowChange
    from tiphys_controller.submit.recover import LostRun, RecoveredRun, count_lost_runs, list_lost_runs, recover_runs
    from tiphys_controller.submit.resume import ResumeResult, plan_run, resume_run
    from tiphys_controller.submit.start import StartResult, start_run
    from tiphys_controller.submit.start_checkpoints import add_start_checkpoints, find_finished_trainings
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

_HOMES = {
    "plan.drift": ("DriftFinding", "format_drift"),
    "run_phase": ("RunPhase",),
    "run_search": ("list_run_summaries",),
    "runs": ("RunDetail", "RunSummary", "describe_run"),
    "submit.fork": ("ForkResult", "fork_run"),
    "submit.plan_report": ("API_VERSION", "ItemReport", "PlanReport", "StartCheckpoint", "StepReport"),
    "submit.planner": ("WorkflowChange",),
    "submit.recover": ("LostRun", "RecoveredRun", "count_lost_runs", "list_lost_runs", "recover_runs"),
    "submit.resume": ("ResumeResult", "plan_run", "resume_run"),
    "submit.start": ("StartResult", "start_run"),
    "submit.start_checkpoints": ("add_start_checkpoints", "find_finished_trainings"),
    "submit.submission": ("locate_workflow",),
    "submit.submitter": (
        "ADDRESS_PREFIX",
        "ClusterSubmitter",
        "LiveWorkflow",
        "ShutdownStrategy",
        "Submitter",
        "TenantSubmitter",
        "is_stable_cluster_name",
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"tiphys_controller.{module}"), name)
    raise AttributeError(f"module 'tiphys_controller' has no attribute {name!r}")
