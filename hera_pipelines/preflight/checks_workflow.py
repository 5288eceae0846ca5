"""Checks of the Workflow object itself: its size, its schedule, and whether its images may change. Each is pure.

A tag may name another program tomorrow. Then the attempts of one training, and a run and its resume,
are not the same program, and a recorded result does not say what made it.
"""

import re
from collections.abc import Iterator

from tiphys_controller.doctor.check import Finding, check, failed, not_checked, passed, warning

from hera_pipelines.compile.workflow_size import MAX_WORKFLOW_BYTES, estimate_size, size_warning
from hera_pipelines.preflight.subject import PodTemplate, PreflightSubject

_NEAR = 0.8
_DIGEST = re.compile(r"@sha(?:256:[0-9a-f]{64}|512:[0-9a-f]{128})$")
_PLACEHOLDER = "{{"
_LATEST = "latest"
_MAX_IMAGES = 50


@check("size")
def check_size(subject: PreflightSubject) -> Iterator[Finding]:
    """The Workflow with all its nodes fits into one object, with room for retries."""
    manifest = subject.pipeline.manifest
    size = estimate_size(manifest)
    if sentence := size_warning(manifest):
        what, _, remedy = sentence.partition(": ")
        yield warning(what, remedy)
    elif size.bytes > _NEAR * MAX_WORKFLOW_BYTES:
        yield warning(
            f"the Workflow will have some {size.nodes:,} nodes and {size.bytes:,} bytes without retries, and Argo "
            f"stores at most {MAX_WORKFLOW_BYTES:,} in one object",
            "start fewer items per run, or configure Argo's node status offloading; see docs/install.md#large-runs",
        )
    else:
        yield passed(f"some {size.nodes:,} nodes and {size.bytes:,} bytes, of {MAX_WORKFLOW_BYTES:,}")


@check("schedule")
def check_schedule(subject: PreflightSubject) -> Iterator[Finding]:
    """The schedule of the pipeline can be applied."""
    if subject.schedule_complaint:
        what, _, remedy = subject.schedule_complaint.rpartition("; ")
        yield failed(what or remedy, remedy if what else "")


@check("images")
def check_images(subject: PreflightSubject) -> Iterator[Finding]:
    """Images are pinned by digest."""
    users: dict[str, list[PodTemplate]] = {}
    for pod in subject.pods:
        for container in pod.containers:
            if image := str(container.get("image") or ""):
                users.setdefault(image, []).append(pod)
    pinned = [image for image in users if _DIGEST.search(image)]
    for image in sorted(users.keys() - pinned)[:_MAX_IMAGES]:
        yield _describe_image(image, users[image])
    if len(users) - len(pinned) > _MAX_IMAGES:
        yield warning(f"{len(users) - len(pinned) - _MAX_IMAGES:,} further images have no digest", "pin them")
    if users and len(pinned) == len(users):
        yield passed(f"all images are pinned by digest ({len(pinned)})")


def _describe_image(image: str, pods: list[PodTemplate]) -> Finding:
    steps = sorted({pod.step for pod in pods})
    where = steps[0] if len(steps) == 1 else ""
    of = f" of {', '.join(steps[:5])}{', …' if len(steps) > 5 else ''}" if len(steps) > 1 else ""
    if _PLACEHOLDER in image:
        return not_checked(f"the image {image}{of} is known only when the step runs", place=where)
    members = max(pod.members for pod in pods)
    consequence = "a later attempt or a resume may run another program"
    if members > 1:
        consequence = f"its {members} pods may run different programs, and {consequence}"
    name = image.rpartition("/")[2]
    if "@" in name:
        return failed(f"the image {image}{of} has a digest that is none", "correct the digest", where)
    tag = name.partition(":")[2]
    # A mutable image is what development uses on purpose, and such a run does not fail: so it never stops a submission.
    named = f"has the tag {tag}" if tag and tag != _LATEST else f"has {'the tag latest' if tag else 'no tag'}"
    return warning(
        f"the image {image}{of} {named}: {consequence}",
        f"pin it: {image.removesuffix(f':{tag}') if tag else image}@sha256:… (`docker buildx imagetools inspect` "
        "prints the digest)",
        where,
    )
