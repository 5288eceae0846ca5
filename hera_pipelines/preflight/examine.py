"""Runs all preflight checks, in the order in which a person should read their findings."""

from tiphys_controller.doctor import Finding

from hera_pipelines.preflight import checks_cluster, checks_gpus, checks_objects, checks_steps, checks_workflow
from hera_pipelines.preflight.observation import PreflightObservation
from hera_pipelines.preflight.subject import PreflightSubject

_OF_ITS_SURROUNDINGS = (
    checks_cluster.check_store,
    checks_cluster.check_cluster,
    checks_cluster.check_version,
    checks_objects.check_submission,
    checks_objects.check_rights,
    checks_gpus.check_gpus,
    checks_objects.check_volumes,
    checks_objects.check_named_objects,
    checks_steps.check_grace,
)
_OF_THE_WORKFLOW = (
    checks_workflow.check_schedule,
    checks_workflow.check_size,
    checks_steps.check_deadlines,
    checks_steps.check_retries,
    checks_steps.check_checkpoints,
    checks_workflow.check_images,
)


def run_preflight_checks(subject: PreflightSubject, observed: PreflightObservation) -> list[Finding]:
    """All findings, those of cluster and store first."""
    return [
        *(finding for check in _OF_ITS_SURROUNDINGS for finding in check(subject, observed)),
        *(finding for check in _OF_THE_WORKFLOW for finding in check(subject)),
    ]
