"""Checks of the installation and of the store: the findings of `tiphys doctor` that concern this Workflow. Pure.

What slows all runs down is for the administrator, so warnings about the cluster as a whole are counted only.
"""

from collections.abc import Iterator

from tiphys_controller import doctor
from tiphys_controller.doctor.check import (
    CheckStatus,
    Finding,
    UnknownValue,
    check,
    failed,
    not_checked,
    passed,
    warning,
)
from tiphys_controller.doctor.observed import ClusterObservation, find_served_store

import tiphys
from hera_pipelines.preflight.observation import PreflightObservation
from hera_pipelines.preflight.subject import PreflightSubject
from tiphys.protocol.gang import GANG_ACCOUNT, GangBackend
from tiphys.store.open import PLACEHOLDER

_ONLY_GPUS = frozenset({"tiphys-kinds", "gpu-ledger", "kueue", "local-queues"})
_HARMLESS = frozenset({"controller", "clocks"})
"""Checks whose failure leaves a new run working, or concerns single nodes."""
_PLUGIN_CHECKS = frozenset({"plugin", "executor-plugins"})


@check("cluster")
def check_cluster(subject: PreflightSubject, observed: PreflightObservation) -> Iterator[Finding]:
    """Argo, Tiphys and the namespace are fit for this Workflow."""
    if isinstance(observed.cluster, UnknownValue):
        queues = ", queues" if subject.gpu_steps and isinstance(observed.queues, UnknownValue) else ""
        reason = observed.unasked or observed.cluster.reason
        yield not_checked(f"installation, rights, claims, Secrets{queues}: {reason}")
        return
    findings = doctor.check_cluster(observed.cluster)
    shown = [
        finding._replace(state=state, sentence=f"{finding.name}: {finding.sentence}", place="")
        for finding in findings
        if (state := _state_for(subject, finding)) is not CheckStatus.OK
    ]
    shown += _check_gang_account(subject, observed.cluster)
    yield from shown
    unread = [finding.name for finding in findings if finding.state is CheckStatus.UNKNOWN]
    if unread:
        yield not_checked(
            f"{len(unread)} of {len(findings)} facts about the cluster could not be read "
            f"({', '.join(unread[:4])}{', …' if len(unread) > 4 else ''})",
            "see `tiphys doctor --cluster`",
        )
    elif not shown:
        warned = sum(finding.state is CheckStatus.WARNING for finding in findings)
        hint = f", and warns of {warned} settings" if warned else ""
        yield passed(f"`tiphys doctor --cluster` finds nothing that stops this Workflow{hint}")


def _state_for(subject: PreflightSubject, found: Finding) -> CheckStatus:
    """How bad a finding of the doctor is for this Workflow; ``OK`` if it is not about it."""
    name = found.check
    if found.state in (CheckStatus.OK, CheckStatus.UNKNOWN):
        return CheckStatus.OK
    if name in _ONLY_GPUS and not subject.gpu_steps:
        return CheckStatus.OK
    if name in _PLUGIN_CHECKS and (found.place or name != "plugin") and subject.spec.get("executorPlugins"):
        return CheckStatus.OK  # the Workflow brings the plugin along
    if name == "artifacts" and not _has_artifacts(subject):
        return CheckStatus.OK
    if name == "gangs":
        return CheckStatus.FAILED if _makes_jobs(subject) else CheckStatus.OK
    if name == "store":
        return CheckStatus.WARNING if _needs_store(subject) else CheckStatus.OK
    if found.state is CheckStatus.FAILED:
        return CheckStatus.WARNING if name in _HARMLESS else CheckStatus.FAILED
    return CheckStatus.WARNING if name in ("local-queues", "artifacts") else CheckStatus.OK


def _check_gang_account(subject: PreflightSubject, cluster: ClusterObservation) -> Iterator[Finding]:
    """For the doctor, a namespace without trainings on several nodes is in order."""
    for namespace in cluster.namespaces:
        accounts = namespace.accounts
        if _makes_jobs(subject) and not isinstance(accounts, UnknownValue) and GANG_ACCOUNT not in accounts:
            yield failed(
                f"{namespace.name}/gangs: trainings on several nodes are off, and this pipeline has one",
                "helm upgrade tiphys charts/tiphys --reuse-values --set gangs.job=true",
            )


def _has_artifacts(subject: PreflightSubject) -> bool:
    return any(
        (template.get(side) or {}).get("artifacts")
        for template in subject.spec.get("templates") or []
        for side in ("inputs", "outputs")
    )


def _makes_jobs(subject: PreflightSubject) -> bool:
    return any(step.gang is not None and step.gang.backend is GangBackend.JOB for step in subject.steps.values())


def _needs_store(subject: PreflightSubject) -> bool:
    """Whether a program writes checkpoints, or records of MLflow, with the credentials of its pod."""
    return subject.pipeline.store.startswith("s3:") and any(
        (step.checkpoints is not None and not step.checkpoints.store.startswith("file:"))
        or step.tracker == "mlflow"
        or step.registration is not None
        for step in subject.steps.values()
    )


@check("version")
def check_version(_subject: PreflightSubject, observed: PreflightObservation) -> Iterator[Finding]:
    """The services are of the version that this command compiles for."""
    if isinstance(observed.plugin_version, UnknownValue):
        return
    installed, own = observed.plugin_version, tiphys.__version__
    if not installed or installed == own:
        yield passed(
            f"this command and the services are version {own}"
            if installed
            else "the services carry no version, so it was not compared",
        )
    elif _minor(installed) != _minor(own):
        yield warning(
            f"the services are version {installed}, and this command compiles for {own}",
            f"use tiphys {installed}, or upgrade the chart",
        )
    else:
        yield passed(f"the services are version {installed}, this command {own}")


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


@check("store")
def check_store(subject: PreflightSubject, observed: PreflightObservation) -> Iterator[Finding]:
    """The store keeps what runs rely on, and the services of the cluster use the same one."""
    url = subject.pipeline.store
    if not url:
        yield not_checked("no store is named", "give --store URL, or write Pipeline(store=…)")
        return
    if isinstance(observed.store, UnknownValue):
        yield not_checked(observed.store.reason, f"try it with `tiphys doctor {url}`")
    else:
        troubled = [finding for finding in observed.store if finding.state is not CheckStatus.OK]
        for finding in troubled:
            sentence = f"{url}: {finding.check}: {finding.sentence}"
            yield finding._replace(sentence=sentence, remedy=f"see `tiphys doctor {url}`")
        if not troubled:
            yield passed(
                f"{url} {observed.store[0].sentence}"
                if len(observed.store) == 1
                else f"{url} passes all {len(observed.store)} checks of `tiphys doctor`",
            )
    if not isinstance(observed.cluster, UnknownValue):
        yield from _check_served_store(subject, observed.cluster, url)


def _check_served_store(subject: PreflightSubject, cluster: ClusterObservation, url: str) -> Iterator[Finding]:
    served = find_served_store(cluster.tiphys.found, subject.namespace)
    if served is None:
        return
    kept = served.url.replace(PLACEHOLDER, subject.namespace)
    if kept.removeprefix("file://").rstrip("/") != url.removeprefix("file://").rstrip("/"):
        yield failed(
            f"the services keep the runs of namespace {subject.namespace} in {kept}, and this pipeline names {url}: "
            "they refuse its steps",
            f"use --store {kept}, or another namespace",
        )
