"""Refuses settings of a step whose effect Tiphys or Argo could not guarantee.

Each check returns a complaint that says what to change, or None.
"""

from collections.abc import Callable

from hera_pipelines.compile import references
from hera_pipelines.compile.authored_step import AuthoredStep, program_container
from hera_pipelines.compile.gang import check_gang
from hera_pipelines.compile.gpu_resources import find_gpu_resources
from hera_pipelines.compile.retries import CAUSES_HIDDEN_FROM_ARGO
from hera_pipelines.compile.settings import CompileOptions
from tiphys.errors import UsageError
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.quantities import format_memory_quantity, parse_memory_bytes
from tiphys.protocol.step_spec import GPU_RESOURCE, RESULT_PARAMETER, RetryPolicy
from tiphys.protocol.variables import find_variables
from tiphys.records import Cause

ARTIFACT_LOCATIONS = ("artifactory", "azure", "gcs", "git", "hdfs", "http", "oss", "plugin", "raw", "s3")
_SHARED_ACCESS_MODE = "ReadWriteMany"
_OWN_NAMES = (("tasks", "name"), ("steps", "name"), ("node", "name"), ("pod", "name"))
_ESCALATION_FIELDS = ("memory_ceiling_bytes", "on_demand_after", "avoid_node_after")


def check_step(step: AuthoredStep, manifest: Manifest, options: CompileOptions) -> None:
    """Check one step, alone and against Workflow and options.

    Raises:
        UsageError: the first complaint about ``step``.
    """
    require_single_container(step)
    complaints = [check(step) for check in _CHECKS]
    complaints += [
        _check_store(step, options),
        _check_queue(step, options),
        _check_volume(step, manifest),
        check_gang(step, manifest),
    ]
    for complaint in complaints:
        if complaint:
            raise UsageError(f"step {step.name!r}: {complaint}")


def require_single_container(step: AuthoredStep) -> Manifest:
    """Return the container of ``step``.

    Raises:
        UsageError: the template is a container set, or has no container.
    """
    if "containerSet" in step.program:
        raise UsageError(
            f"step {step.name!r} is a container set, which Argo leaves hanging when its pod is deleted; "
            "use one container per step"
        )
    return program_container(step.program)


def _check_kind(step: AuthoredStep) -> str | None:
    if not step.is_training and (step.settings.gpu or step.settings.checkpoints or step.settings.volume):
        return "GPUs and checkpoints need the attempts of a training step; use @train(…) or Train(…)"
    return None


def _check_gpus(step: AuthoredStep) -> str | None:
    """A queue counts the GPUs of its leases alone, so a pod has no others."""
    gpu = step.settings.gpu
    for container, name, amount in find_gpu_resources(step.program, gpu.resource if gpu else ""):
        asked = f"{f'{container!r}' if container else 'its container'} asks for {name}: {amount}"
        if container:
            return f"{asked} beside the GPUs of a lease; drop it, or run the step with @plain"
        if gpu is None:
            number = amount if amount.isdigit() else "a number"
            named = "" if name == GPU_RESOURCE else f", gpu_resource={name!r}"
            return (
                f"{asked}, and no lease counts them; use gpus={number}{named} of @train(…) in the place of these "
                "resources (checkpoints=None if it keeps none; tiphys.dev/gpus in YAML), or @plain for GPUs of no queue"
            )
        if name != gpu.resource:
            return (
                f"{asked}, and its lease is for {gpu.resource}; say gpu_resource={name!r} beside gpus= of @train(…) "
                f"(tiphys.dev/gpu-resource in YAML), or drop it from the resources"
            )
        if amount != str(gpu.gpus_per_member):
            plural = "" if gpu.gpus_per_member == 1 else "s"
            return f"{asked} and gpus= for {gpu.gpus_per_member} GPU{plural}; drop {name} from the resources"
    return None


def _check_fan_out(step: AuthoredStep) -> str | None:
    if step.task.get("withItems") == []:
        return "it has no items, and Argo would run it once, with {{item}} unfilled; leave the task out, or add items"
    return None


def _check_output_paths(step: AuthoredStep) -> str | None:
    outputs = step.program.get("outputs") or {}
    paths = {artifact["name"]: artifact.get("path") for artifact in outputs.get("artifacts") or []}
    paths |= {p["name"]: (p.get("valueFrom") or {}).get("path") for p in outputs.get("parameters") or []}
    for name, path in paths.items():
        if path and not path.startswith(("/", "{{")):
            return f"the path {path!r} of its output {name!r} is relative; write an absolute one, such as /tmp/{path}"
    return None


def _check_retry_strategy(step: AuthoredStep) -> str | None:
    if "retryStrategy" not in step.program:
        return None
    if step.is_training:
        return "a training step repeats through admission, so drop its retry_strategy and use retries=Retries(…)"
    if step.settings.retry != RetryPolicy():
        return "it has both a retry_strategy and retries=Retries(…); keep one"
    return None


def _check_budgets(step: AuthoredStep) -> str | None:
    if step.settings.retry.backoff_factor % 1:
        return "Argo's back-off factor is a whole number; change it in retries=Retries(…)"
    if not step.is_training and step.settings.retry.output_missing:
        return "Argo cannot repeat a program that succeeded without its outputs; drop output_missing from Retries(…)"
    budgets = step.settings.retry.model_dump()
    hidden_causes = [
        cause
        for cause in CAUSES_HIDDEN_FROM_ARGO
        if cause is not Cause.OUTPUT_MISSING and budgets.get(cause.value, 0) != 0
    ]
    if hidden_causes and not step.is_training:
        return (
            f"Argo cannot tell {hidden_causes[0].value} from other failures; drop it from Retries(…), or use @train(…)"
        )
    return None


def _check_escalation(step: AuthoredStep) -> str | None:
    """Escalation changes the next attempt through admit, so a plain step cannot have it."""
    retry = step.settings.retry
    changed = [name for name in _ESCALATION_FIELDS if getattr(retry, name) != getattr(RetryPolicy(), name)]
    name = changed[0].removesuffix("_bytes") if changed else ""
    if changed and not step.is_training:
        return f"Argo knows only the last failure of a container, so it cannot apply {name}; use @train(…), or drop it"
    if retry.on_demand_after is not None and not step.settings.spot:
        return "it runs on no spot nodes, so on_demand_after has no effect; add spot=True, or drop it"
    return None if retry.memory_ceiling_bytes is None else _check_memory(step, retry.memory_ceiling_bytes)


def _check_memory(step: AuthoredStep, ceiling_bytes: int) -> str | None:
    resources = require_single_container(step).get("resources") or {}
    amounts = [memory for side in ("limits", "requests") if (memory := (resources.get(side) or {}).get("memory"))]
    if not amounts:
        return "memory_ceiling is for a container with memory in its resources; add that, or drop the ceiling"
    if (most := max(parse_memory_bytes(memory, "its resources") for memory in amounts)) > ceiling_bytes:
        return f"its resources ask for {format_memory_quantity(most)}, more than memory_ceiling; raise the ceiling"
    return None


def _check_pod_spec_patch(step: AuthoredStep) -> str | None:
    if "podSpecPatch" not in step.program:
        return None
    if step.is_training:
        return "the plugin patches the pod of each training attempt; use the step's own options, not pod_spec_patch"
    if step.settings.grace_seconds is not None:
        return "it has both grace and pod_spec_patch; put terminationGracePeriodSeconds into the patch"
    return None


def _check_result(step: AuthoredStep) -> str | None:
    if not step.has_result:
        return None
    read = f"{{{{tasks.{step.name}.outputs.result}}}} is read"
    if step.is_training:
        return f"{read}, and a training has no such output; declare an output parameter instead"
    if step.fan_out:
        return f"{read}, which Argo makes of all items in a form of its own; declare an output parameter instead"
    if any(p["name"] == RESULT_PARAMETER for p in step.output_parameters):
        return f"{read}, and it has an output parameter {RESULT_PARAMETER!r} as well; rename that"
    if step.task.get("continueOn"):
        return f"{read}, which a failed step does not have, and it has continueOn; drop one"
    return None


def _check_shared_program(step: AuthoredStep) -> str | None:
    """A program that reads its own name makes another result in another task, which the step key does not show."""
    if not step.settings.share:
        return None
    read = {variable.names for variable in find_variables(program_container(step.program))}
    own = sorted(".".join(names) for names in read if names in _OWN_NAMES)
    if not own:
        return None
    return (
        f"its program reads {{{{{own[0]}}}}}, which is another where its shared result is taken over; pass a parameter "
        "instead, or leave share=True out"
    )


def _check_template_fields(step: AuthoredStep) -> str | None:
    if "memoize" in step.program:
        return "memoize would hide its outputs from the run store; results are reused already, so drop it"
    if step.program.get("daemon"):
        return "a daemon never ends, so it has no result to record; make it a plain task"
    if "activeDeadlineSeconds" in step.program and step.settings.deadline_seconds is not None:
        return "it has both deadline and active_deadline_seconds; keep one"
    if any(location in (step.program.get("archiveLocation") or {}) for location in ARTIFACT_LOCATIONS):
        return "its archive_location takes its outputs out of the run's bucket; drop it"
    return None


def _check_reserved_names(step: AuthoredStep) -> str | None:
    declared = step.input_parameters + step.input_artifacts + step.output_parameters + step.output_artifacts
    for entry in declared:
        if entry["name"].startswith(references.RESERVED_PREFIX):
            return (
                f"{entry['name']!r}: inputs and outputs named {references.RESERVED_PREFIX}… are Tiphys' own; rename it"
            )
    for variable in require_single_container(step).get("env") or []:
        if variable["name"].startswith("TIPHYS_") or variable["name"] == environment.CHECKPOINT_URI:
            return f"{variable['name']}: Tiphys sets this variable; drop it from env"
    return None


def _check_output_artifacts(step: AuthoredStep) -> str | None:
    for artifact in step.output_artifacts:
        name = artifact["name"]
        if locations := [location for location in ARTIFACT_LOCATIONS if location in artifact]:
            return f"output artifact {name!r} has a location of its own ({locations[0]}); Tiphys gives it one: drop it"
        if not artifact.get("path"):
            return f"output artifact {name!r} has no path; give it Artifact(path=…)"
        if artifact.get("optional"):
            return f"output artifact {name!r} is optional; its outputs prove a step done, so each must be written"
    return None


def _check_output_parameters(step: AuthoredStep) -> str | None:
    for parameter in step.output_parameters:
        name, source = parameter["name"], parameter.get("valueFrom") or {}
        if not source.get("path"):
            return f"output parameter {name!r} has no file; give it Parameter(value_from=ValueFrom(path=…))"
        if "default" in source:
            return f"output parameter {name!r} has a default; its outputs prove a step done, so each must be written"
    return None


def _check_output_variables(step: AuthoredStep) -> str | None:
    taken: dict[str, str] = {}
    for output in step.output_parameters + step.output_artifacts:
        variable = environment.output_path_variable(output["name"])
        if variable in taken:
            return f"outputs {taken[variable]!r} and {output['name']!r} share the variable {variable}; rename one"
        taken[variable] = output["name"]
    return None


def _check_grace(step: AuthoredStep) -> str | None:
    checkpoints = step.settings.checkpoints
    if checkpoints is not None and step.grace_seconds < checkpoints.save_seconds:
        return (
            f"a save takes {checkpoints.save_seconds:g} s and the grace period is {step.grace_seconds} s, so the save "
            "after SIGTERM would be killed; raise grace"
        )
    return None


def _check_store(step: AuthoredStep, options: CompileOptions) -> str | None:
    if (step.settings.checkpoints or step.uses_store) and not options.store:
        kept, way_out = "the ids of MLflow", ""
        if step.settings.checkpoints:
            kept, way_out = (
                "checkpoints",
                ", or checkpoints=None (annotation tiphys.dev/checkpoint-every: none) to keep none",
            )
        return (
            f"it keeps {kept}, but the run has no store to record them in; give --store, set TIPHYS_STORE, or "
            f"write Pipeline(store='s3://…'){way_out}"
        )
    return None


def _check_queue(step: AuthoredStep, options: CompileOptions) -> str | None:
    gpu = step.settings.gpu
    if gpu is not None and options.queues is not None and gpu.queue not in options.queues:
        existing = ", ".join(sorted(options.queues)) or "none"
        return f"queue {gpu.queue!r} does not exist; the queues are: {existing}"
    return None


def _check_volume(step: AuthoredStep, manifest: Manifest) -> str | None:
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
            "name a claim that exists outside it"
        )
    if volume.access_mode != _SHARED_ACCESS_MODE:
        return (
            f"claim {volume.claim!r} is {volume.access_mode}, so an attempt on another node could not mount it; "
            f"use a claim that is {_SHARED_ACCESS_MODE}"
        )
    return None


_CHECKS: tuple[Callable[[AuthoredStep], str | None], ...] = (
    _check_kind,
    _check_gpus,
    _check_fan_out,
    _check_output_paths,
    _check_retry_strategy,
    _check_budgets,
    _check_escalation,
    _check_pod_spec_patch,
    _check_result,
    _check_shared_program,
    _check_template_fields,
    _check_reserved_names,
    _check_output_artifacts,
    _check_output_parameters,
    _check_output_variables,
    _check_grace,
)
