"""1,000 damaged runs are found damaged, sound ones sound, and a verifier with a hole in it is caught.

The planted faults are the point: a suite that passes with a verifier that skips
a shard, trusts sizes, a listing or a cache, or takes another run's manifest,
would prove nothing about one that does not.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from support.builders.corruption import KINDS, LAYERS, NEWEST, Objects, mutations, sound_run
from support.builders.lineage import RUN
from support.builders.seeds import SEED
from support.fakes.memory_store import MemoryStore

from tiphys.lineage.audit import audit, checks
from tiphys.lineage.audit.audit import audit_run, check_bytes
from tiphys.lineage.audit.findings import AuditReport

TRIALS = 1_000
EVERY_LAYER = (*LAYERS, "output")


@cache
def originals() -> tuple[Objects, ...]:
    return tuple(sound_run(SEED + number) for number in range(4))


def verified(objects: Objects, *, in_depth: bool = True) -> AuditReport:
    return audit_run(MemoryStore(objects), RUN, deep=in_depth, threads=1)


def escapes(count: int, layers: tuple[str, ...] = EVERY_LAYER, *, in_depth: bool = True) -> Iterator[str]:
    """Mutations that verification does not find."""
    for number, (kind, layer, apply) in enumerate(mutations(SEED, count, layers)):
        objects = dict(originals()[number % 4])
        apply(objects)
        if verified(objects, in_depth=in_depth).is_sound:
            yield f"seed {SEED}, mutation {number}: {kind} of {layer}"


def test_every_mutation_is_found():
    assert list(escapes(TRIALS)) == []


def test_every_class_meets_every_layer():
    met = Counter((kind, layer) for kind, layer, _ in mutations(SEED, TRIALS, EVERY_LAYER))
    assert set(met) == {(kind, layer) for kind in KINDS for layer in EVERY_LAYER}
    assert set(met.values()) == {TRIALS // (len(KINDS) * len(EVERY_LAYER))}


def test_the_same_seed_damages_in_the_same_way():
    def damaged(seed: int) -> list[Objects]:
        made = []
        for _, _, apply in mutations(seed, 40):
            objects = dict(originals()[0])
            apply(objects)
            made.append(objects)
        return made

    assert damaged(1) == damaged(1)
    assert damaged(1) != damaged(2)


def test_no_sound_run_is_refused():
    for number in range(20):
        objects = sound_run(SEED + number)
        for in_depth in (False, True):
            found = verified(objects, in_depth=in_depth)
            assert found.damage == (), f"seed {SEED + number}: {found.damage}"
            assert (found.checkpoints, found.attempts) == (3, 2)


def test_checkpoints_of_the_trials_have_several_shards():
    for objects in originals():
        assert sum(f"shards/{NEWEST.attempt:09d}-{NEWEST.global_step:015d}/" in key for key in objects) >= 2 * 3


Plant = Callable[[pytest.MonkeyPatch], None]


def skip_a_shard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(audit, "check_bytes", lambda wanted, **options: check_bytes(wanted[1:], **options))


def trust_the_size(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(audit, "check_bytes", lambda wanted, **options: [])


def trust_the_cache(patch: pytest.MonkeyPatch) -> None:
    """Bytes that were right once are taken for those that are there."""
    known = {key: data for objects in originals() for key, data in objects.items()}
    read = audit._hash_object

    def cached(wanted: Any, *others: Any) -> Any:
        matches = len(known.get(wanted.key, b"")) == wanted.size
        return (wanted.size, wanted.sha256) if matches else read(wanted, *others)

    patch.setattr(audit, "_hash_object", cached)


def accept_any_manifest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checks, "manifest_fault", lambda manifest, ref: None)


def skip_the_newest_checkpoint(patch: pytest.MonkeyPatch) -> None:
    commits = checks.list_commits
    patch.setattr(checks, "list_commits", lambda *place: commits(*place)[1:])
    patch.setattr(checks.LineageAudit, "_check_required_checkpoints", lambda self: None)


def ignore_seals(patch: pytest.MonkeyPatch) -> None:
    class Unsealed:
        """A record kind that reads JSON without looking at its seal."""

        def __init__(self, kind: Any) -> None:
            self.__name__ = kind.__name__
            self.model_validate_json = lambda data: kind.model_validate(json.loads(data))

    read = checks.AuditReader.read

    def lax(self: Any, place: Any, key: str, kind: Any, **options: Any) -> Any:
        try:
            return read(self, place, key, Unsealed(kind), **options)
        except (ValueError, TypeError) as error:
            self.add_finding(place, key, str(error))
            return None

    patch.setattr(checks.AuditReader, "read", lax)


def accept_other_spellings(patch: pytest.MonkeyPatch) -> None:
    class Alike:
        def __ne__(self, other: object) -> bool:
            return False

    patch.setattr(checks, "encode_document", lambda document: Alike())


def accept_any_attempt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checks, "_has_identity", lambda *_: True)


def count_no_attempts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checks, "_check_numbers", lambda *_: None)


def ignore_projections(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checks, "_check_done", lambda *_: None)


def expect_no_checkpoint(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checks.LineageAudit, "_check_required_checkpoints", lambda self: None)


def ignore_outputs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checks, "_check_outputs", lambda *_: None)


@pytest.mark.parametrize(
    "plant",
    [
        skip_a_shard,
        trust_the_size,
        trust_the_cache,
        accept_any_manifest,
        skip_the_newest_checkpoint,
        ignore_seals,
        accept_other_spellings,
        accept_any_attempt,
        count_no_attempts,
        ignore_projections,
        expect_no_checkpoint,
        ignore_outputs,
    ],
)
def test_a_planted_fault_in_the_verifier_lets_damage_escape(plant: Plant, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    assert any(escapes(200))


def trust_the_listing(patch: pytest.MonkeyPatch) -> None:
    """Whatever is listed counts as complete."""
    sizes = checks.check_size
    patch.setattr(
        checks,
        "check_size",
        lambda wanted, size, **o: None if size is not None else sizes(wanted, size, **o),
    )


def ignore_what_is_not_listed(patch: pytest.MonkeyPatch) -> None:
    sizes = checks.check_size
    patch.setattr(checks, "check_size", lambda wanted, size, **o: None if size is None else sizes(wanted, size, **o))


SHALLOW = ("truncate", "zero length", "missing", "extra")


def shallow_escapes(count: int) -> Iterator[str]:
    """Of the damage to shards that sizes tell, what escapes without reading bytes."""
    return (text for text in escapes(count, ("shard",), in_depth=False) if any(kind in text for kind in SHALLOW))


def test_sizes_alone_find_what_sizes_can_tell():
    assert list(shallow_escapes(80)) == []


@pytest.mark.parametrize("plant", [trust_the_listing, ignore_what_is_not_listed])
def test_a_planted_fault_in_comparing_sizes_lets_damage_escape(plant: Plant, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    assert any(shallow_escapes(80))
