"""What a step of several pods may not ask for.

The resource template of a step of several pods.
"""

from collections.abc import Callable

from hera_pipelines.compile import references as names
from hera_pipelines.compile.gang.kinds import kind_of
from hera_pipelines.compile.gang.member_pod import files, gang_labels, manifest_text
from hera_pipelines.compile.gated_step import GatedStep, program_container
from hera_pipelines.compile.plugin_templates import input_value, without_empty
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest

_KEPT = ("name", "inputs", "synchronization", "timeout", "priority")


def gang_template(step: GatedStep, template: Manifest, workflow: Manifest) -> Manifest:
    """``template``, which would run the step as one pod, as one that creates the object that runs it as several.

    Args:
        step: A step with a gang.
        template: Its run template.
        workflow: ``spec`` of the Workflow.

    Raises:
        UsageError: a value is used that cannot be handed to several pods.
    """
    assert step.settings.gang is not None
    kind = kind_of(step.settings.gang)
    metadata = {"name": input_value(names.answer("gang")), "labels": gang_labels(step)}
    head = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
    try:
        text = manifest_text({**head, "spec": kind.spec(step, template, workflow)}, _paths(template))
    except UsageError as error:
        raise UsageError(f"step {step.name!r}: {error}") from error
    members = step.settings.gang.members
    made = {
        **{field: template[field] for field in _KEPT if field in template},
        "resource": {
            # Not create: Argo makes its pod again that is lost without a word, and the new one finds what there is.
            "action": "apply",
            # With the Workflow goes what it made.
            "setOwnerReference": True,
            "successCondition": kind.success.format(members=members),
            "failureCondition": kind.failure,
            "manifest": text,
        },
    }
    # What they read is fetched by the members themselves; Argo would load it into a pod of its own.
    made["inputs"] = {"parameters": template["inputs"]["parameters"]}
    return without_empty(made)


def _paths(template: Manifest) -> dict[str, str]:
    """Plain tags that stand for a declared path."""
    return {
        f"{side}.artifacts.{artifact['name']}.path": artifact["path"]
        for side in ("inputs", "outputs")
        for artifact in (template.get(side) or {}).get("artifacts") or []
        if artifact.get("path")
    }


_LONGEST_SCRIPT = 100_000
"""Bytes. Annotations may have 256 KiB together, and ``kubectl apply`` keeps the whole object in one."""
_UNDERSTOOD = frozenset(
    {
        *("activeDeadlineSeconds", "affinity", "archiveLocation", "automountServiceAccountToken", "container"),
        *("hostAliases", "inputs", "metadata", "name", "nodeSelector", "outputs", "priority", "priorityClassName"),
        *("schedulerName", "script", "securityContext", "serviceAccountName", "synchronization", "timeout"),
        *("tolerations", "volumes"),
    }
)


def check_gang(step: GatedStep, manifest: Manifest) -> str | None:
    """The first complaint about a step of several pods; None for any other."""
    if step.settings.gang is None:
        return None
    return next((complaint for check in _CHECKS if (complaint := check(step, manifest))), None)


def _kind(step: GatedStep, manifest: Manifest) -> str | None:  # noqa: ARG001
    if not step.trains:
        return "several nodes need the attempts of a training step; use @train(…) or Train(…)"
    gpu, gang = step.settings.gpu, step.settings.gang
    if gpu is None or gang is None:
        return None
    if (gpu.members, gpu.min_members) != (gang.members, gang.min_members):
        return f"its GPUs are for {gpu.members} pods and it has {gang.members}; let @train(gpus=…, nodes=…) write both"
    return None


def _fields(step: GatedStep, manifest: Manifest) -> str | None:  # noqa: ARG001
    strange = sorted(set(step.program) - _UNDERSTOOD)
    return f"{strange[0]} does not go with several nodes, whose pods are not Argo's own; drop it" if strange else None


def _program(step: GatedStep, manifest: Manifest) -> str | None:  # noqa: ARG001
    container = program_container(step.program)
    if (container.get("command") or [""])[0].rpartition("/")[2] == "tiphys-exec":
        return "tiphys-exec saves the folder of one pod; use tiphys.checkpoint in a training on several nodes"
    if len(container.get("source", "").encode()) > _LONGEST_SCRIPT:
        return f"its source is longer than the {_LONGEST_SCRIPT} bytes that fit into a pod; put it into the image"
    return None


def _files(step: GatedStep, manifest: Manifest) -> str | None:  # noqa: ARG001
    if files(step) is not None and not program_container(step.program).get("command"):
        return (
            "its pods fetch inputs, store outputs and find each other by themselves, around its command, and the entry "
            "point of its image is not known here; give it a command"
        )
    return None


def _claims(step: GatedStep, manifest: Manifest) -> str | None:
    made = {claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates") or []}
    mounted = [mount["name"] for mount in program_container(step.program).get("volumeMounts") or []]
    if found := [name for name in mounted if name in made]:
        return f"claim {found[0]!r} is made by the Workflow, for one pod at a time; name a ReadWriteMany claim"
    return None


def _spot(step: GatedStep, manifest: Manifest) -> str | None:
    """A node selector holds for ever, whatever admit says."""
    if not step.leaves_spot:
        return None
    own = step.program.get("nodeSelector") or manifest["spec"].get("nodeSelector") or {}
    if found := [kind.label for kind in step.settings.spot if kind.label in own]:
        return f"its node selector names {found[0]}, so on_demand_after could not change it; leave that to spot=…"
    return None


_CHECKS: tuple[Callable[[GatedStep, Manifest], str | None], ...] = (_kind, _fields, _program, _files, _claims, _spot)
