"""Runs all preflight checks, in the order in which a person should read their findings."""

from collections.abc import Iterable

from tiphys_controller.doctor import CheckStatus

from hera_pipelines.preflight import (
    checks_cluster,
    checks_gpus,
    checks_namespace,
    checks_program,
    checks_steps,
    checks_workflow,
)
from hera_pipelines.preflight.finding import PreflightFinding
from hera_pipelines.preflight.observation import PreflightObservation
from hera_pipelines.preflight.subject import PreflightSubject

_OF_THE_WORKFLOW = (
    checks_workflow.check_schedule,
    checks_workflow.check_size,
    checks_steps.check_deadlines,
    checks_steps.check_retries,
    checks_steps.check_checkpoints,
    checks_program.check_gang_images,
    checks_program.check_images,
    checks_program.check_data,
)
_OF_ITS_SURROUNDINGS = (
    checks_cluster.check_store,
    checks_cluster.check_cluster,
    checks_namespace.check_rights,
    checks_gpus.check_gpus,
    checks_namespace.check_volumes,
    checks_namespace.check_named_objects,
    checks_steps.check_grace,
)


def run_preflight_checks(subject: PreflightSubject, observed: PreflightObservation) -> list[PreflightFinding]:
    """All findings, those of cluster and store first."""
    return [
        *(finding for look in _OF_ITS_SURROUNDINGS for finding in look(subject, observed)),
        *(finding for check in _OF_THE_WORKFLOW for finding in check(subject)),
    ]


def is_ready(findings: Iterable[PreflightFinding]) -> bool:
    """Whether nothing is known that will go wrong. Warnings, and what was not checked, do not count."""
    return all(finding.state is not CheckStatus.FAILED for finding in findings)
