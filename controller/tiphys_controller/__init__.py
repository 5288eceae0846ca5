"""Plans and resumes runs from storage alone."""

from tiphys_controller.plan.drift import Difference, in_words
from tiphys_controller.runs import Phase, RunDetail, RunSummary, describe, runs_table
from tiphys_controller.submit.fork import Forked, fork
from tiphys_controller.submit.idempotency import start_once
from tiphys_controller.submit.plan_report import API_VERSION, ItemReport, PlanReport, StepReport, plan_run
from tiphys_controller.submit.planner import Change
from tiphys_controller.submit.resume import Resumed, resume
from tiphys_controller.submit.start import Started, start
from tiphys_controller.submit.submitter import ADDRESS, ClusterSubmitter, LiveWorkflow, Shutdown, Submitter, is_known

__all__ = [
    "ADDRESS",
    "API_VERSION",
    "Change",
    "ClusterSubmitter",
    "Difference",
    "Forked",
    "ItemReport",
    "LiveWorkflow",
    "Phase",
    "PlanReport",
    "Resumed",
    "RunDetail",
    "RunSummary",
    "Shutdown",
    "Started",
    "StepReport",
    "Submitter",
    "describe",
    "fork",
    "in_words",
    "is_known",
    "plan_run",
    "resume",
    "runs_table",
    "start",
    "start_once",
]
