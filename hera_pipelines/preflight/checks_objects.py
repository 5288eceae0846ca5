"""Checks of what the pods of a Workflow name in its namespace: claims, Secrets, ConfigMaps, rights. Each is pure."""

from collections.abc import Iterator, Mapping

from tiphys_controller.doctor.check import Finding, UnknownValue, check, failed, known, not_checked, passed, warning
from tiphys_controller.doctor.checks_namespace import EXECUTOR_PERMISSIONS, PERMISSIONS, WORKFLOW_ACCOUNT
from tiphys_controller.doctor.observed import Permission, PluginMode

from hera_pipelines.preflight.observation import PreflightObservation
from hera_pipelines.preflight.subject import CreatedObject, PodTemplate, PreflightSubject
from tiphys.protocol.compiled_workflow import Manifest

_MANY_NODES = frozenset({"ReadWriteMany", "ReadOnlyMany"})
_ONE_POD = "ReadWriteOncePod"


def find_claims(subject: PreflightSubject) -> dict[str, list[PodTemplate]]:
    """Pods by the claim that they mount. A claim that a tag names at run time is left out."""
    users: dict[str, list[PodTemplate]] = {}
    for pod in subject.pods:
        mounted = {
            str(mount.get("name")) for container in pod.containers for mount in container.get("volumeMounts") or []
        }
        for volume in pod.volumes:
            claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            if claim and "{{" not in str(claim) and volume.get("name") in mounted:
                users.setdefault(str(claim), []).append(pod)
    return users


def find_made_claims(subject: PreflightSubject) -> dict[str, tuple[frozenset[str], list[PodTemplate]]]:
    """Access modes and pods of the claims that the Workflow makes (``volumeClaimTemplates``)."""
    made = {}
    for claim in subject.spec.get("volumeClaimTemplates") or []:
        name = str((claim.get("metadata") or {}).get("name", ""))
        modes = frozenset(map(str, (claim.get("spec") or {}).get("accessModes") or []))
        users = [
            pod
            for pod in subject.pods
            if any(
                mount.get("name") == name
                for container in pod.containers
                for mount in container.get("volumeMounts") or []
            )
        ]
        made[name] = (modes, users)
    return made


@check("volumes")
def check_volumes(subject: PreflightSubject, observed: PreflightObservation) -> Iterator[Finding]:
    """A claim exists, and can be mounted on as many nodes as its pods may run on at the same time."""
    for name, (modes, users) in find_made_claims(subject).items():
        yield _judge_claim(name, modes, users)
    for name, users in [] if observed.unasked else sorted(find_claims(subject).items()):
        found = observed.objects if isinstance(observed.objects, UnknownValue) else observed.objects.claims.get(name)
        if isinstance(found, UnknownValue):
            yield not_checked(f"the access mode of claim {name}: {found.reason}", place=users[0].step)
        elif found is None:
            yield failed(
                f"namespace {subject.namespace} has no PersistentVolumeClaim {name}: the pod stays Pending for ever",
                f"create the claim {name}, or name one of `kubectl get pvc -n {subject.namespace}`",
                users[0].step,
            )
        else:
            yield _judge_claim(name, found, users)


def _judge_claim(name: str, modes: frozenset[str], users: list[PodTemplate]) -> Finding:
    text = ", ".join(sorted(modes)) or "without an access mode"
    several = [pod for pod in users if pod.members > 1 or pod.fan_out]
    if not several or modes & _MANY_NODES:
        return passed(f"claim {name} is {text}", users[0].step if users else "")
    pod = next((candidate for candidate in several if candidate.spread), several[0])
    remedy = f"use a claim that is ReadWriteMany in the place of {name}"
    shared = f"its pods share claim {name}, which is {text}"
    if pod.spread:
        sentence = f"{shared}, and its {pod.members} pods run on nodes of their own: one of them can mount it"
        return failed(sentence, remedy, pod.step)
    if modes == {_ONE_POD}:
        return failed(f"{shared}: they run one by one", remedy, pod.step)
    return warning(
        f"{shared}: a pod on another node than the first waits, or fails",
        f"{remedy}, or keep the pods on one node",
        pod.step,
    )


def find_named_objects(subject: PreflightSubject) -> tuple[dict[str, str], dict[str, str]]:
    """Secrets and ConfigMaps without which a pod does not start, each with the step of the first such pod."""
    secrets: dict[str, str] = {}
    config_maps: dict[str, str] = {}
    for pod in subject.pods:
        for secret, config_map in _iter_object_names(pod):
            for name, found in ((secret, secrets), (config_map, config_maps)):
                if name and "{{" not in name:
                    found.setdefault(name, pod.step)
    return secrets, config_maps


def _iter_object_names(pod: PodTemplate) -> Iterator[tuple[str, str]]:
    mounted = {mount.get("name") for container in pod.containers for mount in container.get("volumeMounts") or []}
    for volume in (volume for volume in pod.volumes if volume.get("name") in mounted):
        yield _required(volume.get("secret"), "secretName"), _required(volume.get("configMap"), "name")
    for container in pod.containers:
        for source in container.get("envFrom") or []:
            yield _required(source.get("secretRef"), "name"), _required(source.get("configMapRef"), "name")
        for variable in container.get("env") or []:
            source = variable.get("valueFrom") or {}
            yield _required(source.get("secretKeyRef"), "name"), _required(source.get("configMapKeyRef"), "name")


def _required(reference: Manifest | None, field: str) -> str:
    return str(reference.get(field) or "") if reference and not reference.get("optional") else ""


@check("secrets")
def check_named_objects(subject: PreflightSubject, observed: PreflightObservation) -> Iterator[Finding]:
    """Secrets and ConfigMaps that the pods name exist."""
    secrets, config_maps = find_named_objects(subject)
    for kind, steps in (("Secret", secrets), ("ConfigMap", config_maps)):
        if not steps or observed.unasked:
            continue
        if isinstance(observed.objects, UnknownValue):
            yield not_checked(f"{kind} {', '.join(sorted(steps))}: {observed.objects.reason}")
            continue
        found = observed.objects.secrets if kind == "Secret" else observed.objects.config_maps
        for name, step in steps.items():
            yield _judge_object(subject, kind, name, step, found.get(name, False))


def _judge_object(subject: PreflightSubject, kind: str, name: str, step: str, exists: bool | UnknownValue) -> Finding:
    if isinstance(exists, UnknownValue):
        return not_checked(f"{kind} {name}: {exists.reason}", place=step)
    if exists:
        return passed(f"{kind} {name} exists; its content was not read", step)
    return failed(
        f"namespace {subject.namespace} has no {kind} {name}: the pod does not start",
        f"create {kind} {name} in {subject.namespace}, or correct the name",
        step,
    )


def find_accounts(subject: PreflightSubject) -> list[str]:
    """Service accounts of the pods, beside those that `tiphys doctor` looks for."""
    named: list[object] = [subject.account, subject.executor_account]
    for template in subject.spec.get("templates") or []:
        named += [template.get("serviceAccountName"), (template.get("executor") or {}).get("serviceAccountName")]
    return sorted({str(name) for name in named if name and "{{" not in str(name)} - PERMISSIONS.keys())


def find_needed_rights(
    subject: PreflightSubject, mode: PluginMode | None, plurals: Mapping[tuple[str, str], str]
) -> dict[tuple[str, Permission], str]:
    """Rights beside those that `tiphys doctor` tries, each with the step that needs it (empty: all).

    Without ``mode`` the plugin runs in sidecars. ``plurals`` has the plural of each kind that a ``resource`` template
    creates, by API version and kind.
    """
    needed: dict[tuple[str, Permission], str] = {}
    if subject.account != WORKFLOW_ACCOUNT and mode is not PluginMode.AGENT:
        needed |= {(subject.account, right): "" for right in PERMISSIONS[WORKFLOW_ACCOUNT]}
    if subject.executor_account not in PERMISSIONS:
        needed |= {(subject.executor_account, right): "" for right in EXECUTOR_PERMISSIONS}
    for step, account, created in subject.created_objects:
        plural = plurals.get((created.api_version, created.kind))
        if plural and created.namespace in ("", subject.namespace):
            group = created.api_version.rpartition("/")[0]
            for verb in _needed_verbs(created):
                needed.setdefault((account, Permission(verb, plural, group)), step)
    return needed


def _needed_verbs(created: CreatedObject) -> tuple[str, ...]:
    """Verbs of the API server by Argo's action, which is kubectl's (``workflow/executor/resource.go``)."""
    return {
        "create": ("create", "get"),
        "apply": ("create", "get"),  # and patch, only if the object exists
        "patch": ("get", "patch"),
        "replace": ("get", "update"),
        "delete": ("delete",),
        "get": ("get",),
    }.get(created.action, ())


@check("rights")
def check_rights(subject: PreflightSubject, observed: PreflightObservation) -> Iterator[Finding]:
    """The accounts of the Workflow may do what its pods do."""
    if observed.unasked:
        return
    if isinstance(observed.rights, UnknownValue):
        yield not_checked(f"the accounts of the pods: {observed.rights.reason}")
        return
    for account in observed.rights.missing_accounts:
        yield failed(
            f"namespace {subject.namespace} has no service account {account}: its pods are never made",
            f"kubectl create serviceaccount {account} -n {subject.namespace}, or name another account",
        )
    for kind, step in observed.rights.missing_kinds.items():
        yield failed(f"the cluster has no kind {kind}: the step ends in Error", "install it", step)
    lacking: dict[str, list[str]] = {}
    for (account, right), is_allowed in observed.rights.allowed.items():
        if not is_allowed:
            lacking.setdefault(account, []).append(f"{right}{f'.{right.group}' if right.group else ''}")
    for account, rights in lacking.items():
        yield failed(
            f"service account {account} may not {', '.join(sorted(rights))} in {subject.namespace}: its pods end in "
            "Error",
            "bind a Role with these rights to the account, or name an account that has them",
        )
    if observed.rights.allowed and not lacking:
        yield passed("the accounts of the Workflow may do what its pods do")


@check("submit")
def check_submission(subject: PreflightSubject, observed: PreflightObservation) -> Iterator[Finding]:
    """The caller may submit the Workflow."""
    if observed.unasked:
        return
    if known(observed.may_submit):
        yield passed(f"you may create Workflows in {subject.namespace}")
    else:
        yield failed(
            f"you may not create Workflows in namespace {subject.namespace}",
            "ask for the right, choose another namespace with -n, or submit through an argo-server",
        )
