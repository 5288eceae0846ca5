"""Final phases of Workflows and pods.

Plugin and controller must agree on them: a phase that only one of them counts as final would start an attempt while the
previous one still runs.

Sources: Argo Workflows ``pkg/apis/workflow/v1alpha1/workflow_phase.go`` (``Completed``), Kubernetes
``api/core/v1/types.go`` (``PodPhase``).
"""

_FINAL_WORKFLOW_PHASES = frozenset({"Succeeded", "Failed", "Error"})
_FINAL_POD_PHASES = frozenset({"Succeeded", "Failed"})


def is_final_workflow_phase(phase: str | None) -> bool:
    """Whether a Workflow in this phase has ended. A Workflow without a phase has not started."""
    return phase in _FINAL_WORKFLOW_PHASES


def is_final_pod_phase(phase: str | None) -> bool:
    """Whether all containers of a pod in this phase have ended. A pod on a lost node has the phase ``Unknown``."""
    return phase in _FINAL_POD_PHASES
