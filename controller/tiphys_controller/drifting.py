"""What has changed between a run and what shall go on with it, and whether that may be.

Two Workflows are compared fact by fact. A step whose program, inputs or outputs
have changed is in the next Workflow, with everything that hangs on it; whether
its result still stands is decided by its step key, when its inputs are known.
"""

from collections.abc import Iterator, Mapping, Sequence

from tiphys.errors import ConflictError
from tiphys.protocol.drift import Drift, DriftAction, DriftPolicy
from tiphys.protocol.pipeline import CompiledPipeline
from tiphys.records import Record
from tiphys_controller.facets import commit, facts

_NO_KEY = (Drift.WORLD_SIZE, Drift.VERSIONS)


class Difference(Record):
    """One fact that is another one than before; ``step`` is empty for what concerns all of them."""

    drift: Drift
    step: str
    place: str
    before: str
    after: str
    action: DriftAction = DriftAction.ALLOW


def differences(before: CompiledPipeline, after: CompiledPipeline, policy: DriftPolicy) -> tuple[Difference, ...]:
    """Every fact that differs, in the order of the tasks of ``after``. Tasks that only one of them has are no drift."""
    return tuple(one.model_copy(update={"action": policy.action(one.drift)}) for one in _differences(before, after))


def changed(before: CompiledPipeline, after: CompiledPipeline, found: Sequence[Difference]) -> Mapping[str, str]:
    """Steps whose results may not stand any more, by name, each with what has changed, in words."""
    reasons: dict[str, list[str]] = {}
    for name, spec in after.steps.items():
        old = before.steps.get(name)
        mine = [one for one in found if one.step == name]
        if old is None or not mine:
            continue
        program = (old.template, old.parameters, old.artifacts) != (spec.template, spec.parameters, spec.artifacts)
        inputs = any(one.drift in (Drift.PARAMETERS, Drift.DATA) for one in mine)
        if program or inputs:
            reasons[name] = list(dict.fromkeys(one.drift.value for one in mine if one.drift not in _NO_KEY))
    return {
        name: f"its {_listed(drifts)} changed; taken over if it makes no difference" for name, drifts in reasons.items()
    }


def gate(found: Sequence[Difference], run: str, forking: bool) -> None:
    """Let through what may differ.

    Raises:
        ConflictError: something may not, or only in a new run, and what to do.
    """
    refused = [one for one in found if one.action is DriftAction.REFUSE]
    if refused:
        raise ConflictError(
            f"run {run} may not go on with this: {_first(refused)}; put it back, or allow it this time with "
            f"--drift {refused[0].drift.value}=warn"
        )
    other = [one for one in found if one.action is DriftAction.FORK]
    if other and not forking:
        raise ConflictError(
            f"this would be another experiment under the name of run {run}: {_first(other)}; begin a run of its own "
            f"with `tiphys fork {run} …`, or allow it this time with --drift {other[0].drift.value}=warn"
        )


def in_words(one: Difference) -> str:
    """One difference, in a line."""
    where = f"{one.step}: " if one.step else ""
    before, after = _without_what_is_equal(one.before, one.after)
    return f"{where}{one.drift.value.replace('_', ' ')} {one.place} {_short(before)} → {_short(after)}"


def _differences(before: CompiledPipeline, after: CompiledPipeline) -> Iterator[Difference]:
    if commit(before) and commit(after) and commit(before) != commit(after):
        yield Difference(drift=Drift.CODE, step="", place="commit", before=commit(before), after=commit(after))
    common = {task["name"] for task in before.tasks()}
    for name in (task["name"] for task in after.tasks() if task["name"] in common):
        old, new = facts(before, name), facts(after, name)
        for drift, place in dict.fromkeys([*old, *new]):
            one, other = old.get((drift, place), ""), new.get((drift, place), "")
            if one != other:
                yield Difference(drift=drift, step=name, place=place, before=one, after=other)


def _first(found: Sequence[Difference]) -> str:
    others = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{in_words(found[0])}{others}"


def _without_what_is_equal(before: str, after: str) -> tuple[str, str]:
    """Two long lines from a few letters before their first difference on."""
    pairs = enumerate(zip(before, after, strict=False))
    equal = next((place for place, (one, other) in pairs if one != other), 0) - _LETTERS_BEFORE
    if equal <= _LETTERS_BEFORE or "\n" in before + after:
        return before, after
    return f"…{before[equal:]}", f"…{after[equal:]}"


def _short(text: str) -> str:
    lines = text.strip().splitlines()
    if not lines:
        return "nothing"
    if len(lines) > 1:
        return f"{len(lines)} lines"
    return lines[0] if len(lines[0]) <= _LONGEST else f"{lines[0][: _LONGEST - 1]}…"


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1]


_LONGEST = 60
_LETTERS_BEFORE = 12
