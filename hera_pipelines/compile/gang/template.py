"""The resource template of a step of several pods, and the settings that such a step may not have."""

from collections.abc import Callable

from hera_pipelines.compile.authored_step import AuthoredStep, program_container
from hera_pipelines.compile.gang.kinds import select_object_kind
from hera_pipelines.compile.gang.member_pod import gang_labels, render_manifest
from hera_pipelines.compile.plugin_templates import admit_placeholder, drop_empty_fields
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.gang import GANG_ACCOUNT

_COPIED_FIELDS = ("name", "inputs", "synchronization", "timeout", "priority")


def gang_template(step: AuthoredStep, template: Manifest, workflow: Manifest) -> Manifest:
    """Convert the run template of a step, for one pod, to a resource template that creates the object of its gang.

    Raises:
        UsageError: the template uses a value that Argo cannot substitute in the object.
    """
    assert step.settings.gang is not None
    kind = select_object_kind(step.settings.gang)
    metadata = {"name": admit_placeholder("gang"), "labels": gang_labels(step)}
    head = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
    try:
        text = render_manifest({**head, "spec": kind.build_spec(step, template, workflow)}, _artifact_paths(template))
    except UsageError as error:
        raise UsageError(f"step {step.name!r}: {error}") from error
    members = step.settings.gang.members
    resource_template = {
        **{field: template[field] for field in _COPIED_FIELDS if field in template},
        "executor": {"serviceAccountName": GANG_ACCOUNT},
        "resource": {
            # Not create: Argo recreates its own pod after a loss, and the new pod must accept the existing object.
            "action": "apply",
            # Kubernetes deletes the object together with the Workflow.
            "setOwnerReference": True,
            "successCondition": kind.success.format(members=members),
            "failureCondition": kind.failure,
            "manifest": text,
        },
    }
    # The members fetch input artifacts themselves; Argo would load them into its own pod.
    resource_template["inputs"] = {"parameters": template["inputs"]["parameters"]}
    return drop_empty_fields(resource_template)


def _artifact_paths(template: Manifest) -> dict[str, str]:
    """Paths of the declared artifacts, by the plain tag of each."""
    return {
        f"{side}.artifacts.{artifact['name']}.path": artifact["path"]
        for side in ("inputs", "outputs")
        for artifact in (template.get(side) or {}).get("artifacts") or []
        if artifact.get("path")
    }


_MAX_SCRIPT_BYTES = 100_000
"""All annotations of an object may have 256 KiB, and ``kubectl apply`` copies the whole object into one of them."""
_SUPPORTED_FIELDS = frozenset(
    {
        *("activeDeadlineSeconds", "affinity", "archiveLocation", "automountServiceAccountToken", "container"),
        *("hostAliases", "inputs", "metadata", "name", "nodeSelector", "outputs", "priority", "priorityClassName"),
        *("schedulerName", "script", "securityContext", "serviceAccountName", "synchronization", "timeout"),
        *("tolerations", "volumes"),
    }
)


def check_gang(step: AuthoredStep, manifest: Manifest) -> str | None:
    """Return the first complaint about a step of several pods; None for a valid step, and for one of a single pod."""
    if step.settings.gang is None:
        return None
    return next((complaint for check in _CHECKS if (complaint := check(step, manifest))), None)


def _check_kind(step: AuthoredStep, manifest: Manifest) -> str | None:  # noqa: ARG001
    if not step.is_training:
        return "several nodes need the attempts of a training step; use @train(…) or Train(…)"
    gpu, gang = step.settings.gpu, step.settings.gang
    if gpu is None or gang is None:
        return None
    if (gpu.members, gpu.min_members) != (gang.members, gang.min_members):
        return f"its GPUs are for {gpu.members} pods and it has {gang.members}; let @train(gpus=…, nodes=…) write both"
    return None


def _check_fields(step: AuthoredStep, manifest: Manifest) -> str | None:  # noqa: ARG001
    unsupported = sorted(set(step.program) - _SUPPORTED_FIELDS)
    if not unsupported:
        return None
    return f"{unsupported[0]} is not supported on several nodes, whose pods Argo does not create; drop it"


def _check_program(step: AuthoredStep, manifest: Manifest) -> str | None:  # noqa: ARG001
    container = program_container(step.program)
    if (container.get("command") or [""])[0].rpartition("/")[2] == "tiphys-exec":
        return "tiphys-exec saves the folder of one pod; use tiphys.checkpoint in a training on several nodes"
    if len(container.get("source", "").encode()) > _MAX_SCRIPT_BYTES:
        return f"its source is longer than the {_MAX_SCRIPT_BYTES} bytes that fit into a pod; put it into the image"
    return None


def _check_claims(step: AuthoredStep, manifest: Manifest) -> str | None:
    claims = {claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates") or []}
    mounted = [mount["name"] for mount in program_container(step.program).get("volumeMounts") or []]
    if mounted_claims := [name for name in mounted if name in claims]:
        return f"claim {mounted_claims[0]!r} is made by the Workflow, for one pod at a time; name a ReadWriteMany claim"
    return None


def _check_spot(step: AuthoredStep, manifest: Manifest) -> str | None:
    """Refuse a node selector for spot nodes: admit cannot change it for later attempts."""
    if not step.may_leave_spot:
        return None
    selector = step.program.get("nodeSelector") or manifest["spec"].get("nodeSelector") or {}
    if fixed := [kind.label for kind in step.settings.spot if kind.label in selector]:
        return f"its node selector names {fixed[0]}, so on_demand_after has no effect; drop it and use spot=…"
    return None


_CHECKS: tuple[Callable[[AuthoredStep, Manifest], str | None], ...] = (
    _check_kind,
    _check_fields,
    _check_program,
    _check_claims,
    _check_spot,
)
