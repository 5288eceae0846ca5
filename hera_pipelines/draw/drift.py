"""What a checkpoint was made with, in a few words: where it stands, and what is new since the one before it.

A commit, an image or a version on every line would hide the one line on which it
changes, and that is the one that explains a curve which bends there.
"""

from collections.abc import Iterator

from tiphys.records import Facts


def in_short(facts: Facts, before: Facts | None) -> tuple[str, ...]:
    """Short lines about ``facts``; ``before`` are those of the parent, None if nobody knows them. Pure."""
    return (*_standing(facts), *(_drift(before, facts) if before is not None else ()))


def _standing(facts: Facts) -> Iterator[str]:
    if facts.epoch is not None:
        yield f"epoch {facts.epoch}"
    if facts.world_size > 1:
        yield f"{facts.world_size} ranks"


def _drift(before: Facts, now: Facts) -> Iterator[str]:
    if before.world_size != now.world_size:
        yield f"before: {before.world_size} rank{'s' if before.world_size > 1 else ''}"
    for what, old, new in (
        ("parameters", before.parameters, now.parameters),
        ("data", before.dataset, now.dataset),
    ):
        if old and new and old != new:
            yield f"other {what}"
    if before.git_commit and now.git_commit and before.git_commit != now.git_commit:
        yield f"code {before.git_commit[:7]} → {now.git_commit[:7]}"
    if before.image and now.image and before.image != now.image:
        yield f"image {before.image} → {now.image}"
    for package, version in now.versions.items():
        if (known := before.versions.get(package)) not in (None, version):
            yield f"{package} {known} → {version}"
