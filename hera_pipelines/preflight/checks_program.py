"""Checks of what a step runs and reads: images and input data that may change between attempts. Each is pure.

A tag or a branch may name another program tomorrow. Then the attempts of one training, and a run and its resume,
are not the same program, and a recorded result does not say what made it.
"""

import re
from collections.abc import Iterator
from typing import Any

from tiphys_controller.doctor.check import Finding, check, failed, not_checked, passed, warning

from hera_pipelines.preflight.subject import PodTemplate, PreflightSubject, iter_calls
from tiphys.protocol.compiled_workflow import Manifest

_DIGEST = re.compile(r"@sha(?:256:[0-9a-f]{64}|512:[0-9a-f]{128})$")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_CONTENT_HASH = re.compile(r"(?<![0-9a-f])[0-9a-f]{32,128}(?![0-9a-f])|[?&]versionId=\w", re.IGNORECASE)
_PLACEHOLDER = "{{"
_LATEST = "latest"
_MAX_IMAGES = 50
_MAX_REFERENCES = 50


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


@check("gang-images")
def check_gang_images(subject: PreflightSubject) -> Iterator[Finding]:
    """All pods that train together have one image."""
    for pod in subject.pods:
        images = sorted(set(pod.main_images))
        if pod.members > 1 and len(images) > 1:
            yield warning(  # a launcher may have its own: the object is the author's, and its roles are not known
                f"the roles of its object have different images: {', '.join(images[:5])}",
                "give all pods that train together one image",
                pod.step,
            )
        elif pod.members > 1:
            yield passed(f"its {pod.members} pods have one image", pod.step)


@check("data")
def check_data(subject: PreflightSubject) -> Iterator[Finding]:
    """Inputs are pinned to a version: what was read is otherwise not recorded, and a resume may read something else."""
    found = dict.fromkeys(_iter_references(subject))
    for step, sentence, remedy in list(found)[:_MAX_REFERENCES]:
        yield warning(f"{sentence}; a resume may read something else, and a result may be reused", remedy, step)
    if len(found) > _MAX_REFERENCES:
        yield warning(f"{len(found) - _MAX_REFERENCES:,} further inputs are not pinned", "pin them")
    if not found:
        yield passed("no input is named by a reference that is known to change")


_Reference = tuple[str, str, str]
"""Step, sentence and remedy."""


def _iter_references(subject: PreflightSubject) -> Iterator[_Reference]:
    for artifact in (subject.spec.get("arguments") or {}).get("artifacts") or []:
        yield from _check_artifact("", artifact)
    for template in subject.spec.get("templates") or []:
        step = subject.step_of(template.get("name", ""))
        for artifact in (template.get("inputs") or {}).get("artifacts") or []:
            yield from _check_artifact(step, artifact)
        for call in iter_calls(template):
            for artifact in (call.get("arguments") or {}).get("artifacts") or []:
                yield from _check_artifact(str(call.get("name", "")), artifact)
    for pod in subject.pods:
        for container in pod.containers:
            yield from _check_container(pod.step, container)


_REMOTE_FILES = {"s3": "key", "gcs": "key", "oss": "key", "azure": "blob", "hdfs": "path", "http": "url"}
_ONE_KEY = "put a version or a content hash into its name, and never write that name again"


def _check_artifact(step: str, artifact: Manifest) -> Iterator[_Reference]:
    name = artifact.get("name")
    if isinstance(git := artifact.get("git"), dict):
        revision = str(git.get("revision") or git.get("branch") or "")
        if not _COMMIT.fullmatch(revision) and _PLACEHOLDER not in revision:
            named = f"the revision {revision}" if revision else "the default branch"
            yield (
                step,
                f"input {name!r} is {named} of {git.get('repo')}",
                "give the full commit as its revision",
            )
    for kind, field in _REMOTE_FILES.items():
        place = str((artifact.get(kind) or {}).get(field) or "") if isinstance(artifact.get(kind), dict) else ""
        if place and _PLACEHOLDER not in place and not _CONTENT_HASH.search(place):
            yield step, f"input {name!r} is {kind} {place}, whose content may be replaced", _ONE_KEY


_HUB_URL = re.compile(r"hf://[^\s\"'<>]+|https://huggingface\.co/[^\s\"'<>]+/(?:resolve|tree|blob)/[^\s\"'<>]+")
_HUB_REVISION = re.compile(r"^hf://[^@]+@(?P<hub>[^/]+)|/(?:resolve|tree|blob)/(?P<page>[^/?]+)")
_REVISION_OPTION = re.compile(r"(?<![\w-])--[\w-]*revision(?:=|\s+)(?P<value>[^\s\"']+)")
_REVISION_VARIABLE = re.compile(r"(?:HF|HUB|MODEL|DATASET)\w*_REVISION", re.IGNORECASE)
_HUB_REMEDY = "name the commit of the repository, which its page shows under History"


def _check_container(step: str, container: Manifest) -> Iterator[_Reference]:
    line = " ".join(str(word) for word in [*_list(container.get("command")), *_list(container.get("args"))])
    values = {str(variable.get("name")): str(variable.get("value") or "") for variable in _list(container.get("env"))}
    for text in (line, *values.values(), str(container.get("source") or "")):
        for url in _HUB_URL.findall(text):
            found = _HUB_REVISION.search(url)
            revision = (found["hub"] or found["page"]) if found else ""
            if not _COMMIT.fullmatch(revision) and _PLACEHOLDER not in url:
                yield step, f"it reads {url} of Hugging Face, which is no fixed revision", _HUB_REMEDY
    revisions = [match["value"] for match in _REVISION_OPTION.finditer(line)]
    revisions += [value for name, value in values.items() if _REVISION_VARIABLE.fullmatch(name) and value]
    for revision in revisions:
        if not _COMMIT.fullmatch(revision) and _PLACEHOLDER not in revision:
            yield step, f"it reads the revision {revision!r}, which is no commit", _HUB_REMEDY


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
