"""What a gated step may not ask for, because Tiphys could not keep its word about it."""

from collections.abc import Callable

from hera_pipelines.compile import references as names
from hera_pipelines.compile.gang import check_gang
from hera_pipelines.compile.gated_step import GatedStep, program_container
from hera_pipelines.compile.retries import UNSEEN
from hera_pipelines.compile.settings import CompileOptions
from tiphys.errors import UsageError
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.quantities import memory_bytes, memory_quantity
from tiphys.protocol.step_spec import RetryPolicy
from tiphys.records import Cause

_LOCATIONS = ("artifactory", "azure", "gcs", "git", "hdfs", "http", "oss", "plugin", "raw", "s3")
_SHARED_MODE = "ReadWriteMany"
_ESCALATIONS = ("memory_ceiling_bytes", "on_demand_after", "avoid_node_after")


def check_step_alone(step: GatedStep, manifest: Manifest, options: CompileOptions) -> None:
    """Raise `UsageError` with the first complaint about ``step``."""
    program_container_of_step(step)
    complaints = [check(step) for check in _CHECKS]
    complaints += [_store(step, options), _queue(step, options), _volume(step, manifest), check_gang(step, manifest)]
    for complaint in complaints:
        if complaint:
            raise UsageError(f"step {step.name!r}: {complaint}")


def program_container_of_step(step: GatedStep) -> Manifest:
    """The container of ``step``; refuses a container set with its own reason."""
    if "containerSet" in step.program:
        raise UsageError(
            f"step {step.name!r} is a container set, which Argo leaves hanging when its pod is deleted; "
            "use one container per step"
        )
    return program_container(step.program)


def _kind(step: GatedStep) -> str | None:
    if not step.trains and (step.settings.gpu or step.settings.checkpoints or step.settings.volume):
        return "GPUs and checkpoints need the attempts of a training step; use @train(…) or Train(…)"
    return None


def _fan_out(step: GatedStep) -> str | None:
    if step.task.get("withItems") == []:
        return "it has no items, and Argo would run it once, with {{item}} unfilled; leave the task out, or add items"
    return None


def _retry_strategy(step: GatedStep) -> str | None:
    if "retryStrategy" not in step.program:
        return None
    if step.trains:
        return "a training step repeats through admission, so drop its retry_strategy and use retries=Retries(…)"
    if step.settings.retry != RetryPolicy():
        return "it has both a retry_strategy and retries=Retries(…); keep one"
    return None


def _budgets(step: GatedStep) -> str | None:
    if step.settings.retry.backoff_factor % 1:
        return "Argo's back-off factor is a whole number; change it in retries=Retries(…)"
    if not step.trains and step.settings.retry.output_missing:
        return "Argo cannot repeat a program that succeeded without its outputs; drop output_missing from Retries(…)"
    given = step.settings.retry.model_dump()
    own = [cause for cause in UNSEEN if cause is not Cause.OUTPUT_MISSING and given.get(cause.value, 0) != 0]
    if own and not step.trains:
        return f"Argo cannot tell {own[0].value} from other failures; drop it from Retries(…), or use @train(…)"
    return None


def _escalation(step: GatedStep) -> str | None:
    """Each attempt gets what admit answers; a step without attempts has no such answer."""
    retry = step.settings.retry
    asked = [name for name in _ESCALATIONS if getattr(retry, name) != getattr(RetryPolicy(), name)]
    name = asked[0].removesuffix("_bytes") if asked else ""
    if asked and not step.trains:
        return f"Argo knows only the last failure of a container, so it cannot keep {name}; use @train(…), or drop it"
    if "avoid_node_after" in asked and step.settings.gang is not None:
        return "avoid_node_after reaches no pods of a training on several nodes; drop it from Retries(…)"
    if retry.on_demand_after is not None and not step.settings.spot:
        return "it runs on no spot nodes, so on_demand_after says nothing; add spot=True, or drop it"
    return None if retry.memory_ceiling_bytes is None else _memory(step, retry.memory_ceiling_bytes)


def _memory(step: GatedStep, ceiling_bytes: int) -> str | None:
    resources = program_container_of_step(step).get("resources") or {}
    given = [memory for side in ("limits", "requests") if (memory := (resources.get(side) or {}).get("memory"))]
    if not given:
        return "memory_ceiling is for a container with memory in its resources; add that, or drop the ceiling"
    if (most := max(memory_bytes(memory, "its resources") for memory in given)) > ceiling_bytes:
        return f"its resources ask for {memory_quantity(most)}, more than memory_ceiling; raise the ceiling"
    return None


def _pod_spec_patch(step: GatedStep) -> str | None:
    if "podSpecPatch" not in step.program:
        return None
    if step.trains:
        return "the plugin patches the pod of each training attempt; use the step's own options, not pod_spec_patch"
    if step.settings.grace_seconds is not None:
        return "it has both grace and pod_spec_patch; put terminationGracePeriodSeconds into the patch"
    return None


def _template_fields(step: GatedStep) -> str | None:
    if "memoize" in step.program:
        return "memoize would hide its outputs from the run store; results are reused already, so drop it"
    if step.program.get("daemon"):
        return "a daemon never ends, so it has no result to keep; make it a plain task"
    if "activeDeadlineSeconds" in step.program and step.settings.deadline_seconds is not None:
        return "it has both deadline and active_deadline_seconds; keep one"
    if any(location in (step.program.get("archiveLocation") or {}) for location in _LOCATIONS):
        return "its archive_location takes its outputs out of the run's bucket; drop it"
    return None


def _reserved_names(step: GatedStep) -> str | None:
    declared = step.input_parameters + step.input_artifacts + step.output_parameters + step.output_artifacts
    for entry in declared:
        if entry["name"].startswith(names.RESERVED):
            return f"{entry['name']!r}: inputs and outputs named {names.RESERVED}… are Tiphys' own; rename it"
    for variable in program_container_of_step(step).get("env") or []:
        if variable["name"].startswith("TIPHYS_") or variable["name"] == environment.CHECKPOINT_URI:
            return f"{variable['name']}: Tiphys sets this variable; drop it from env"
    return None


def _output_artifacts(step: GatedStep) -> str | None:
    for artifact in step.output_artifacts:
        name = artifact["name"]
        if own := [location for location in _LOCATIONS if location in artifact]:
            return f"output artifact {name!r} has a location of its own ({own[0]}); Tiphys gives it one: drop it"
        if not artifact.get("path"):
            return f"output artifact {name!r} has no path; give it Artifact(path=…)"
        if artifact.get("optional"):
            return f"output artifact {name!r} is optional; its outputs prove a step done, so each must be written"
    return None


def _output_parameters(step: GatedStep) -> str | None:
    for parameter in step.output_parameters:
        name, source = parameter["name"], parameter.get("valueFrom") or {}
        if not source.get("path"):
            return f"output parameter {name!r} has no file; give it Parameter(value_from=ValueFrom(path=…))"
        if "default" in source:
            return f"output parameter {name!r} has a default; its outputs prove a step done, so each must be written"
    return None


def _output_variables(step: GatedStep) -> str | None:
    taken: dict[str, str] = {}
    for output in step.output_parameters + step.output_artifacts:
        variable = environment.output_path_variable(output["name"])
        if variable in taken:
            return f"outputs {taken[variable]!r} and {output['name']!r} share the variable {variable}; rename one"
        taken[variable] = output["name"]
    return None


def _grace(step: GatedStep) -> str | None:
    checkpoints = step.settings.checkpoints
    if checkpoints is not None and step.grace_seconds < checkpoints.save_seconds:
        return (
            f"a save takes {checkpoints.save_seconds:g} s and the grace period is {step.grace_seconds} s, so the save "
            "after SIGTERM would be killed; raise grace"
        )
    return None


def _store(step: GatedStep, options: CompileOptions) -> str | None:
    if step.settings.checkpoints and not options.store:
        return "it keeps checkpoints, but the run has no store to record them in; give Pipeline(store='s3://…')"
    return None


def _queue(step: GatedStep, options: CompileOptions) -> str | None:
    gpu = step.settings.gpu
    if gpu is not None and options.queues is not None and gpu.queue not in options.queues:
        known = ", ".join(sorted(options.queues)) or "none"
        return f"queue {gpu.queue!r} does not exist; the queues are: {known}"
    return None


def _volume(step: GatedStep, manifest: Manifest) -> str | None:
    volume = step.settings.volume
    if volume is None:
        return None
    if step.settings.checkpoints is None:
        return "it has a checkpoint volume, but keeps no checkpoints; add checkpoints=Checkpoints(…)"
    if not volume.mount_path.startswith("/"):
        return f"the checkpoint volume's mount_path {volume.mount_path!r} is not absolute"
    claims = [claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates") or []]
    if volume.claim in claims:
        return (
            f"claim {volume.claim!r} is made by the Workflow, so the next submission would find it empty; "
            "name a claim that exists by itself"
        )
    if volume.access_mode != _SHARED_MODE:
        return (
            f"claim {volume.claim!r} is {volume.access_mode}, so an attempt on another node could not mount it; "
            f"use a claim that is {_SHARED_MODE}"
        )
    return None


_CHECKS: tuple[Callable[[GatedStep], str | None], ...] = (
    _kind,
    _fan_out,
    _retry_strategy,
    _budgets,
    _escalation,
    _pod_spec_patch,
    _template_fields,
    _reserved_names,
    _output_artifacts,
    _output_parameters,
    _output_variables,
    _grace,
)
