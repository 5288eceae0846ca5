"""Plans and resumes runs from storage alone."""

from tiphys_controller.change import Change
from tiphys_controller.drifting import Difference, in_words
from tiphys_controller.forking import Forked, fork
from tiphys_controller.inspecting import RunDetail, RunSummary, describe, runs_table
from tiphys_controller.once import start_once
from tiphys_controller.phase import Phase
from tiphys_controller.report import API_VERSION, ItemReport, PlanReport, StepReport, plan_run
from tiphys_controller.resuming import Resumed, resume
from tiphys_controller.starting import Started, start
from tiphys_controller.submitter import ADDRESS, ClusterSubmitter, LiveWorkflow, Shutdown, Submitter, is_known

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
