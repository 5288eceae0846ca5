"""What a gated container finds in its environment."""

from hera_pipelines.compile import names
from hera_pipelines.compile.gated import GatedStep, program_container
from tiphys.protocol import environment
from tiphys.protocol.keep import DELETE_AFTER_SECONDS
from tiphys.protocol.pipeline import Manifest
from tiphys.protocol.policy import CheckpointPolicy


def variables(step: GatedStep, store: str) -> list[Manifest]:
    """The variables of `tiphys.protocol.environment`, as Kubernetes wants them."""
    values = {
        environment.STORE: store,
        environment.RUN: _answer("run-id"),
        environment.STEP: _answer("step"),
        environment.ATTEMPT: _answer("attempt"),
        environment.GRACE_SECONDS: str(step.grace_seconds),
    }
    checkpoints = step.spec().checkpoints
    if checkpoints is not None:
        values |= _checkpoint_values(checkpoints, store)
        values[environment.IMAGE] = program_container(step.program).get("image", "")
    values |= _paths(step)
    return [{"name": name, "value": value} for name, value in values.items() if value]


def _checkpoint_values(policy: CheckpointPolicy, store: str) -> dict[str, str]:
    return {
        environment.LINEAGE: _answer("lineage"),
        environment.RESUME_FROM: _answer("resume-from"),
        environment.CHECKPOINT_URI: _answer("checkpoint-uri"),
        environment.CHECKPOINT_STORE: policy.store or store,
        environment.SAVE_EVERY: _every(policy),
        environment.KEEP_LAST: "all" if policy.keep_last is None else str(policy.keep_last),
        environment.METRICS: policy.metrics,
        **_rarely_set(policy),
    }


def _rarely_set(policy: CheckpointPolicy) -> dict[str, str]:
    """What few ask for, so that the Workflows of all others do not grow by it."""
    values = {
        environment.KEEP_EVERY: f"{policy.keep_every} steps" if policy.keep_every else "",
        environment.KEEP_BEST: str(policy.keep_best or ""),
        environment.ASYNCHRONOUS: "" if policy.asynchronous else "false",
        environment.WHEN_BUSY: policy.when_busy or "",
        environment.CACHE: policy.cache,
    }
    if policy.hang_after_seconds is not None:
        values[environment.HANG_AFTER_SECONDS] = f"{policy.hang_after_seconds:g}"
    if policy.delete_after_seconds != DELETE_AFTER_SECONDS:
        values[environment.DELETE_AFTER_SECONDS] = f"{policy.delete_after_seconds:g}"
    return values


def _every(policy: CheckpointPolicy) -> str:
    if policy.every_bounds:
        lowest, highest = policy.every_bounds
        return f"auto:{lowest:g}s..{highest:g}s"
    return f"{policy.every:g}{'s' if policy.every_unit == 'seconds' else ' steps'}"


def _paths(step: GatedStep) -> dict[str, str]:
    inputs = {environment.input_path_variable(a["name"]): a["path"] for a in step.input_artifacts}
    parameters = {environment.output_path_variable(p["name"]): p["valueFrom"]["path"] for p in step.output_parameters}
    artifacts = {environment.output_path_variable(a["name"]): a["path"] for a in step.output_artifacts}
    return inputs | parameters | artifacts


def _answer(name: str) -> str:
    return f"{{{{inputs.parameters.{names.answer(name)}}}}}"
