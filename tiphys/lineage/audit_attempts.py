"""Claims, ends and outputs of a run: each as it was written, and none missing that another one implies."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tiphys.lineage.audit_records import Reader
from tiphys.lineage.damage import Layer, Place, Wanted, size_damage
from tiphys.records import AttemptClaim, AttemptEnd, Outcome
from tiphys.store import RunLayout
from tiphys.store.layout import parse_attempt, parse_done


@dataclass
class AttemptRecords:
    """What could be read of the attempts of one step, by number, and which keys there are."""

    claims: dict[int, AttemptClaim] = field(default_factory=dict)
    ends: dict[int, AttemptEnd] = field(default_factory=dict)
    claimed: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


def audit_attempts(reader: Reader, step: str = "") -> Mapping[str, AttemptRecords]:
    """Check the attempts of all steps, or of one with its items."""
    steps: dict[str, AttemptRecords] = {}
    listed = {info.key: parse_attempt(info.key) for info in reader.store.list(RunLayout(reader.run).attempts)}
    places = {key: place for key, place in listed.items() if place is not None and belongs(place[0], step)}
    reader.read_ahead(list(places))
    for key, place in places.items():
        _read(reader, steps.setdefault(place[0], AttemptRecords()), key, *place)
    for name, records in sorted(steps.items()):
        _check_numbers(reader, name, records)
        for end in records.ends.values():
            _check_outputs(reader, end)
    _check_done(reader, steps, step)
    return steps


def belongs(name: str, step: str) -> bool:
    """Whether step id ``name`` is what a person means by ``step``: the same, or an item of it."""
    return step in ("", name, name.partition(".")[0])


def _read(reader: Reader, records: AttemptRecords, key: str, step: str, number: int, is_end: bool) -> None:
    place = Place(Layer.END if is_end else Layer.CLAIM, step, number)
    (records.ended if is_end else records.claimed).add(number)
    record: AttemptClaim | AttemptEnd | None
    record = reader.read(place, key, AttemptEnd) if is_end else reader.read(place, key, AttemptClaim)
    if record is None:
        return
    if not _is_of(record, reader.run, step, number):
        reader.say(place, key, f"it is that of attempt {record.attempt} of {record.run}/{record.step}")
    elif isinstance(record, AttemptEnd):
        records.ends[number] = record
    else:
        records.claims[number] = record


def _is_of(record: AttemptClaim | AttemptEnd, run: str, step: str, number: int) -> bool:
    return (record.run, record.step, record.attempt) == (run, step, number)


def _check_numbers(reader: Reader, step: str, records: AttemptRecords) -> None:
    """Attempts count from 1 without a gap, and the next one is claimed only once there is an end."""
    layout = RunLayout(reader.run)
    newest = max(records.claimed | records.ended)
    for number in range(1, newest + 1):
        if number not in records.claimed:
            why = "it has an end" if number in records.ended else f"attempt {newest} was opened after it"
            reader.say(Place(Layer.CLAIM, step, number), layout.attempt(step, number), f"it is missing, and {why}")
        if number not in records.ended and number < newest:
            fault = f"it is missing, and attempt {newest} was opened after it"
            reader.say(Place(Layer.END, step, number), layout.attempt_end(step, number), fault)


def _check_outputs(reader: Reader, end: AttemptEnd) -> None:
    objects = [one for output in end.outputs for one in output.objects] if end.outcome is Outcome.DONE else []
    if not objects:
        return
    sizes = {info.key: info.size for info in reader.store.list(RunLayout(end.run).outputs(end.step, end.attempt))}
    place = Place(Layer.OUTPUT, end.step, end.attempt)
    for one in objects:
        wanted = Wanted(place, reader.store, one.key, one.size, one.sha256)
        reader.wanted.append(wanted)
        if (found := size_damage(wanted, sizes.get(one.key), run=reader.run)) is not None:
            reader.found.append(found)


def _check_done(reader: Reader, steps: Mapping[str, AttemptRecords], step: str) -> None:
    """A projection is derived from a done end, so where there is one, there was the other."""
    layout = RunLayout(reader.run)
    for info in reader.store.list(layout.done):
        found = parse_done(info.key)
        if found is None or not belongs(found[0], step):
            continue
        name, number, _ = found
        if number not in steps.get(name, AttemptRecords()).ended:
            fault = "it is missing, yet the attempt counts as done"
            reader.say(Place(Layer.END, name, number), layout.attempt_end(name, number), fault)
