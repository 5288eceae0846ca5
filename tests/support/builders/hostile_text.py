"""Text that takes over a terminal, a run whose records can hold it, and what a terminal or a pipe gets to see of it."""

import hashlib
import io
import json
import os
import pty
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any, NamedTuple

from support.builders.lineage import (
    RUN,
    START_TIMES,
    STEP,
    claim_of,
    commit,
    end_of,
    ref,
    write_claim,
    write_end,
    write_run,
)
from tiphys.protocol.step_spec import GpuRequest
from tiphys.records import (
    AttemptEndOutcome,
    CheckpointCrash,
    CrashRecord,
    DataVersion,
    Escalation,
    Event,
    EventBatch,
    FailureEvidence,
    ItemBinding,
    LastCheckpoint,
    MemoRecord,
    Output,
    OutputKind,
    OutputObject,
    PinRecord,
    Preemption,
    Provenance,
    QuarantineRecord,
    SkippedCheckpoint,
    SubmissionBinding,
    SubmissionClaim,
    SubmissionEnd,
    SubmissionKind,
    TombstoneRecord,
    json_digest,
    utc_now,
)
from tiphys.records.base import compute_seal, encode_document
from tiphys.store import LineageLayout, RunLayout, Store, memo_key
from tiphys.store.incarnations import crash_key
from tiphys.store.layout import event_batch_key

MARK = "evil.example"
HOSTILE = f"{MARK} " + " ".join(
    (
        "\x1b]0;title\x07",
        f"\x1b]8;;https://{MARK}\x1b\\link\x1b]8;;\x1b\\",
        "\x1b]52;c;ZXZpbA==\x07",
        "\x1b[2J\x1b[7A\x1b[38;5;201mred",
        "\x9b2J\x9d0;title\x9c",
        "\x01\x08\x0b\x0c\x1c\x0d\x7f\x85",
        "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c\u2028\u2029",
        f"[link=https://{MARK}]markup[/link][/red]",
    )
)
"""Every character and sequence that a terminal may obey, and markup of the library that prints for Tiphys."""

_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
"""Controls, halves of surrogate pairs, separators of lines and paragraphs, and marks of direction; not LF and tab."""
_OUR_OWN = re.compile(r"\x1b\[(?!38;5;201m)[0-9;]*m|\x1b\[\?25[lh]|\x1b\[2K|\x1b\[1A|\r(?=[\n\x1b])")
"""What a terminal gets from Tiphys itself: colours, and the cursor moves of a live table. `HOSTILE` holds none."""


def control_characters(text: str) -> list[str]:
    """The characters of ``text`` that a terminal may obey, each with what stands around it."""
    return [repr(text[max(0, one.start() - 20) : one.start() + 20]) for one in _COMMANDS.finditer(text)]


class Shown(NamedTuple):
    """What a call wrote to its two streams."""

    result: Any
    out: str
    err: str

    def leaks(self, *, terminal: bool) -> list[str]:
        """Control characters in both streams; a terminal may get those of Tiphys itself."""
        streams = (_OUR_OWN.sub("", text) if terminal else text for text in (self.out, self.err))
        return [leak for text in streams for leak in control_characters(text)]


def on_pipe(call: Callable[[], Any]) -> Shown:
    """Call with two streams that are no terminals."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        result = call()
    return Shown(result, *(stream.buffer.getvalue().decode() for stream in (out, err)))  # type: ignore[attr-defined]


def on_terminal(call: Callable[[], Any]) -> Shown:
    """Call with two streams that are terminals."""
    with _Terminal() as out, _Terminal() as err:
        with redirect_stdout(out.stream), redirect_stderr(err.stream):
            result = call()
        return Shown(result, out.close(), err.close())


class _Terminal:
    """A pseudo terminal, and the thread that reads what it would display."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        self._got = bytearray()
        self._reader = threading.Thread(target=self._read)

    def __enter__(self) -> "_Terminal":
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> str:
        """Everything that was written, once nothing more can come."""
        if not self.stream.closed:
            self.stream.close()
            self._reader.join()
            os.close(self._master)
        return self._got.decode()

    def _read(self) -> None:
        with suppress(OSError):  # what a read from a terminal without a writer ends with
            while chunk := os.read(self._master, 1 << 16):
                self._got += chunk


NAMES = {
    "run": f"control/runs/{MARK}\x1b]0;x\x07\u202e\x9b/run.json",
    "output": f"{RunLayout(RUN).outputs(STEP, 2)}{HOSTILE.replace('/', '.')[:200]}",
    "shard": f"{LineageLayout(f'{RUN}/{STEP}').shards(1, 20)}{HOSTILE.replace('/', '.')[:200]}",
}
"""Keys of objects that hold such text, as whoever may write to the store may choose them."""


def write_full_run(store: Store) -> dict[str, Any]:
    """Write a run with every record that a command reads; the record of each key."""
    layout, lineage = RunLayout(RUN), LineageLayout(f"{RUN}/{STEP}")
    run = write_run(store, gpu=GpuRequest(gpus=4, queue="research"), parameters={"lr": "0.1"}, code_version="abc123")
    node, now = "wf.fit", utc_now()
    data = (DataVersion(name="data/train", algorithm="md5", digest="0" * 32, size_bytes=7, files=2),)
    submission: dict[str, Any] = {"run": RUN, "submission": 1}
    place = {"namespace": "ml", "workflow_name": f"{RUN}-abc", "cluster": "local:desk"}
    first = claim_of(1).model_copy(
        update={"parameters": "p" * 64, "lease": "lease-1", "nodes": ("n1",), "flavor": "spot"}
        | {"skipped": (SkippedCheckpoint(checkpoint=ref(1, 5), reason="it is damaged"),), "data": data}
    )
    escalation = Escalation(explanation="more memory", memory_bytes=9)
    second = claim_of(2, ref(1, 10)).model_copy(update={"escalation": escalation})
    evidence = FailureEvidence(rule="exit-code", matched_text="the pod said so", node="n1")
    preempted = Preemption(
        for_step=f"other-1/{STEP}", for_run="other-1", asked_at=now, gone_at=now, gpus=4, committed=ref(1, 20)
    )
    crash = CheckpointCrash(loaded=ref(1, 10), fingerprint="ValueError at train.py", steps=3)
    failed = end_of(1, message="the node is gone").model_copy(
        update={"evidence": evidence, "preempted": preempted, "death": crash, "exit_code": 1}
        | {"last_checkpoint": LastCheckpoint(checkpoint=ref(1, 20), at=now, began=START_TIMES)}
    )
    key = f"{layout.outputs(STEP, 2)}total"
    store.create(key, b"40000")
    total = Output(
        name="total",
        kind=OutputKind.PARAMETER,
        key=key,
        value="40000",
        objects=(OutputObject(key=key, size=5, sha256=hashlib.sha256(b"40000").hexdigest()),),
    )
    done = end_of(2, outcome=AttemptEndOutcome.DONE).model_copy(update={"outputs": (total,)})
    for claim, end in ((first, failed), (second, done)):
        write_claim(store, claim)
        write_end(store, end)
    facts = Provenance(
        data_position={"shard": "train-1"}, git_commit="abc", image="trainer:1", dataset="d1", versions={"numpy": "2"}
    ).model_copy(update={"data": data})
    manifests = {
        lineage.manifest(attempt, step): commit(
            store, ref(attempt, step), parent=parent, facts=facts, metrics={"loss": 0.5}
        )
        for attempt, step, parent in ((1, 10, None), (1, 20, ref(1, 10)), (2, 30, ref(1, 10)))
    }
    event = Event(name="attempt.started", step=STEP, attempt=1, message="attempt 1 started", data={"node": node})
    more: dict[str, Any] = {
        layout.submission(1): SubmissionClaim(**submission, **place, kind=SubmissionKind.ORIGINAL),
        layout.submission_binding(1): SubmissionBinding(**submission, **place, uid="uid-1"),
        layout.submission_end(1): SubmissionEnd(**submission, status="Failed", message="it was stopped"),
        layout.item(1, STEP): ItemBinding(
            **submission, step=STEP, instance=node, label="fit(0:lr:0.1)", item='{"lr":0.1}'
        ),
        crash_key(layout, STEP, 1): CrashRecord(
            run=RUN, step=STEP, attempt=1, error="ValueError: nan", fingerprint="f", stacks="Thread 1", stuck_seconds=9
        ),
        memo_key("ab" * 32): MemoRecord(run=RUN, step=STEP, attempt=2),
        event_batch_key(layout.program_events, 1): EventBatch(run=RUN, source="trainer", events=(event,)),
        lineage.quarantined(1, 20): QuarantineRecord(checkpoint=ref(1, 20), reason="it crashes", by="plugin"),
        lineage.pin(1, 10, "release-1"): PinRecord(checkpoint=ref(1, 10), name="release-1", by="me"),
        lineage.tombstone(2, 30): TombstoneRecord(checkpoint=ref(2, 30)),
    }
    for where, record in more.items():
        store.create(where, record.to_bytes())
    claims = {layout.attempt(STEP, one.attempt): one for one in (first, second)}
    ends = {layout.attempt_end(STEP, one.attempt): one for one in (failed, done)}
    return {layout.run_record: run, **claims, **ends, **manifests, **more}


def hostile_variants(record: Any) -> Iterator[tuple[str, bytes]]:
    """The record once for each of its texts, with `HOSTILE` added to this text, and with a seal that fits."""
    document = json.loads(record.to_bytes())
    for path in _texts(document):
        changed = json.loads(json.dumps(document))
        parent = changed
        for name in path[:-1]:
            parent = parent[name]
        parent[path[-1]] = f"{parent[path[-1]]}{HOSTILE}"
        yield ".".join(map(str, path)), _sealed(changed)


def _texts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, str) and path[-1] not in ("seal", "nonce", "digest"):
        yield path
    for name, inner in (
        value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    ):
        yield from _texts(inner, (*path, name))


def _sealed(document: dict[str, Any]) -> bytes:
    """The stored form of a changed document, with the digests that whoever may write it can compute."""
    if "workflow" in document and isinstance(document["workflow"], dict):
        document["digest"] = json_digest(document["workflow"])
    if "seal" in document:
        document["seal"] = compute_seal(document)
    return encode_document(document)
