"""Checks of retries, of grace periods and of the time that a run has. Each is pure."""

from collections.abc import Iterator
from typing import Any

from tiphys_controller.doctor.check import Finding, UnknownValue, check, failed, not_checked, passed, warning

from hera_pipelines.compile.gpu_resources import find_gpu_resources
from hera_pipelines.preflight.observation import PreflightObservation, SaveTimes
from hera_pipelines.preflight.subject import PreflightSubject
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import StepKind, StepSpec
from tiphys.records import Cause

MANY_REPEATS = 3
"""Up to so many repeats of an error that comes again are cheap enough to find out that it does."""

_DETERMINISTIC = {
    Cause.USER_ERROR: "an error of the program comes again",
    Cause.OUTPUT_MISSING: "a program that writes no output writes none the next time",
    Cause.GPU_OUT_OF_MEMORY: "the same batch does not fit the next time",
}


@check("retries")
def check_retries(subject: PreflightSubject) -> Iterator[Finding]:
    """Budgets repeat what can pass by itself, and not often what comes again."""
    findings = [*_check_budgets(subject), *_check_strategies(subject)]
    yield from findings
    if not findings:
        yield passed("no step repeats an error often that comes again")


def _check_budgets(subject: PreflightSubject) -> Iterator[Finding]:
    for step in subject.steps.values():
        for cause, reason in _deterministic_causes(step).items():
            budget = step.retry.budget(cause)
            if budget is None or budget > MANY_REPEATS:
                times = "without limit" if budget is None else f"{budget} times"
                yield warning(
                    f"{cause.value} is retried {times}: {reason}, and a retry costs the time up to it",
                    f"set Retries({cause.value}={MANY_REPEATS}) or less",
                    step.name,
                )


def _deterministic_causes(step: StepSpec) -> dict[Cause, str]:
    causes = dict(_DETERMINISTIC)
    if step.kind is StepKind.STEP:
        causes.pop(Cause.OUTPUT_MISSING)
        causes.pop(Cause.GPU_OUT_OF_MEMORY)
    if step.retry.memory_ceiling_bytes is None:
        causes[Cause.OUT_OF_MEMORY] = "the next attempt has the same memory (memory_ceiling is not set)"
    if step.checkpoints is None:
        causes[Cause.DEADLINE] = "without checkpoints, the next attempt begins anew and has the same deadline"
    return causes


def _check_strategies(subject: PreflightSubject) -> Iterator[Finding]:
    """Strategies of the author, which Argo applies whatever the cause is."""
    for template in subject.spec.get("templates") or []:
        name = template.get("name", "")
        strategy = template.get("retryStrategy")
        if not isinstance(strategy, dict) or not _repeats_everything(strategy):
            continue
        limit = str(strategy["limit"]) if strategy.get("limit") is not None else ""
        if limit.isdecimal() and int(limit) <= MANY_REPEATS:
            continue
        times = f"{limit} times" if limit else "for ever"
        yield warning(
            f"its retryStrategy repeats every failure, {times}: also errors of the program, which come again",
            "set retryPolicy: OnError or OnTransientError, or an expression; a step can have retries=Retries(…) by "
            "cause instead",
            subject.step_of(name),
        )


def _repeats_everything(strategy: Manifest) -> bool:
    """Argo's default policy is OnFailure; with an expression alone, the expression decides."""
    policy = strategy.get("retryPolicy") or "OnFailure"
    return not strategy.get("expression") and policy in ("Always", "OnFailure")


@check("checkpoints")
def check_checkpoints(subject: PreflightSubject) -> Iterator[Finding]:
    """Long work can be continued: a training keeps checkpoints, and GPUs go to trainings."""
    for pod in subject.pods:
        asked = [gpu_resource for each in pod.containers for gpu_resource in find_gpu_resources({"container": each})]
        if asked and not subject.steps_of(pod.template):
            sentence = (
                f"a plain task asks for {asked[0].name}: no queue counts its GPUs, and a retry loses all of its work"
            )
            yield warning(sentence, "make it a @train(gpus=…) or Train", pod.step)
    for step in subject.steps.values():
        if step.kind is not StepKind.TRAIN:
            continue
        if step.checkpoints is None:
            sentence = "it keeps no checkpoints (checkpoints=None): each attempt starts from the beginning"
            yield warning(sentence, "leave checkpoints= out, or write Checkpoints(…)", step.name)
        else:
            sentence = (
                "it keeps checkpoints, if its program opens tiphys.checkpoint.session() or runs under tiphys-exec"
            )
            yield passed(sentence, step.name)


@check("grace")
def check_grace(subject: PreflightSubject, observed: PreflightObservation) -> Iterator[Finding]:
    """A save after SIGTERM, with its upload, fits into the grace period."""
    for step in subject.steps.values():
        if step.checkpoints is None:
            continue
        saves = None if isinstance(observed.saves, UnknownValue) else observed.saves.get(step.name)
        if saves is not None:
            yield _judge_grace(step, saves)
        elif step.checkpoints.save_seconds:
            yield passed(
                f"the grace period of {step.grace_seconds:g} s is not shorter than the declared save of "
                f"{step.checkpoints.save_seconds:g} s",
                step.name,
            )
        else:
            reason = observed.saves.reason if isinstance(observed.saves, UnknownValue) else "no earlier run saved"
            yield not_checked(
                f"the time of a save was not measured yet ({reason}); the grace period is {step.grace_seconds:g} s",
                "declare Checkpoints(save_time=…), or repeat this after the first run",
                step.name,
            )


def _judge_grace(step: StepSpec, saves: SaveTimes) -> Finding:
    measured = (
        f"{saves.saves} measured saves took {saves.median_seconds:.1f} s (p50) and {saves.p99_seconds:.1f} s (p99)"
    )
    grace = f"the grace period is {step.grace_seconds:g} s"
    remedy = f"set grace='{round(saves.p99_seconds * 1.5) + 1}s', and let the nodes allow as much"
    if saves.median_seconds > step.grace_seconds:
        return failed(f"{measured}, and {grace}: most saves after SIGTERM are killed", remedy, step.name)
    if saves.p99_seconds > step.grace_seconds:
        return warning(f"{measured}, and {grace}: some saves after SIGTERM are killed", remedy, step.name)
    return passed(f"{measured}, within the grace period of {step.grace_seconds:g} s", step.name)


@check("deadline")
def check_deadlines(subject: PreflightSubject) -> Iterator[Finding]:
    """A deadline of the Workflow also runs while its steps wait for GPUs."""
    waiting = [step.name for step in subject.gpu_steps]
    if not waiting:
        return
    found = dict(_iter_deadlines(subject))
    for owner, seconds in found.items():
        yield warning(
            f"activeDeadlineSeconds of {owner} is {seconds} s, and time in a queue counts: {', '.join(waiting[:5])} "
            f"may be stopped before {'it has' if len(waiting) == 1 else 'they have'} run",
            "set deadline=… on the steps, which counts from the start of a pod, and leave this one out",
        )
    if not found:
        yield passed("no deadline runs while steps wait for GPUs")


def _iter_deadlines(subject: PreflightSubject) -> Iterator[tuple[str, Any]]:
    if seconds := subject.spec.get("activeDeadlineSeconds"):
        yield "the Workflow", seconds
    for template in subject.spec.get("templates") or []:
        is_group = "dag" in template or "steps" in template
        if is_group and template.get("activeDeadlineSeconds"):
            yield f"template {template.get('name')!r}", template["activeDeadlineSeconds"]
