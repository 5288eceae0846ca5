"""What Argo's nodes say of the program of an attempt. They outlive its pods, which may be gone with their node."""

from collections.abc import Sequence
from typing import Any

from tiphys.protocol.operations import attempt_node_name
from tiphys.protocol.step_spec import StepKind
from tiphys.records import AttemptClaim
from tiphys_plugin.attempts import pods
from tiphys_plugin.cluster.interface import PodStatus
from tiphys_plugin.runtime.context import StepCall

_MAX_ARGO_MESSAGE_CHARACTERS = 300


def find_argo_message(call: StepCall, attempt: AttemptClaim) -> str:
    """What Argo says about the node of the program, such as why the API server refused its pod; may be empty."""
    messages = [str(node.get("message") or "") for node in _find_program_nodes(call, attempt)]
    return next((message[:_MAX_ARGO_MESSAGE_CHARACTERS] for message in reversed(messages) if message), "")


def find_argo_exit_code(call: StepCall, attempt: AttemptClaim) -> str:
    """The exit code of the program in Argo's node, which outlives its pod; may be empty."""
    codes = [str((node.get("outputs") or {}).get("exitCode") or "") for node in _find_program_nodes(call, attempt)]
    return next((code for code in codes if code), "")


def find_last_try(call: StepCall, attempt: AttemptClaim, pod_statuses: Sequence[PodStatus]) -> int:
    """Number of the last try of a `Step`, from its pods, or from Argo's nodes where the pods are gone; else 0."""
    if call.spec.kind is not StepKind.STEP:
        return 0
    nodes = [pod.node for pod in pod_statuses] or [str(node["name"]) for node in _find_program_nodes(call, attempt)]
    return max(map(pods.parse_try_number, nodes), default=0)


def is_program_done(call: StepCall, attempt: AttemptClaim, pod_statuses: Sequence[PodStatus]) -> bool:
    """Whether the last pod of the attempt has succeeded, or Argo's node of the program if the pods are gone."""
    if pod_statuses:
        return pod_statuses[-1].phase == "Succeeded"
    return next((node.get("phase") == "Succeeded" for node in _find_program_nodes(call, attempt)), False)


def _find_program_nodes(call: StepCall, attempt: AttemptClaim) -> list[dict[str, Any]]:
    """Argo's nodes of the program, that of all its tries first; none of another workflow."""
    binding = call.binding
    if attempt.uid != binding.uid:
        return []
    workflow = call.context.cluster.workflow(binding.namespace, binding.workflow) or {}
    nodes = ((workflow.get("status") or {}).get("nodes") or {}).values()
    parent = attempt_node_name(attempt.node)
    found = [node for node in nodes if str(node.get("name", "")).startswith(f"{parent}.run")]
    return sorted(found, key=lambda node: len(str(node["name"])))
