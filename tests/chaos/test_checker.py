"""The checker of the simulation is shown histories with one fault each, and a healthy one.

| history | law |
|---|---|
| nothing wrong | none |
| a told checkpoint that the next attempt does not start from; one that is not there; one not restored | acknowledged |
| a manifest without its shard; after an end that could be seen; without a look; a start that does not count | commit |
| the newest checkpoint goes; what is pinned; an attempt's start; shards before their manifest; a claim | retention |
| three pods of four GPUs | quota |
| a second Workflow of a submission; two at once; a pod of one that is not bound; two answers | submission |
| an attempt without an end; ended while its pod runs; done twice; another result; a run that does not end | end |
| an unknown key; a shard alone; a damaged one; a pin alone; an end alone; what no key leads to | object |
"""

import ast
import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaos import checker

RUN = "digits-1"
CONTROL, LINEAGE = f"control/runs/{RUN}", f"data/lineages/{RUN}/fit"
ATTEMPTS = f"{CONTROL}/attempts/fit/"
NEWEST, OPEN = f"control/newest/82327/72824927-{RUN}", f"control/open/{RUN}.000000001.1767227320347"
Change = Callable[["Story"], object]


class Story:
    """A history and a bucket, written by hand: two attempts of a training, of which the first is killed."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}
        self.add("settings", keys=["nightly"])
        self.create(NEWEST, {})
        self.create(OPEN, {})
        self.create(f"{CONTROL}/run.json", {})
        self.create(f"{CONTROL}/submissions/000000001.json", {})
        self.add("workflow created", name=RUN, uid="u1", run=RUN, submission=1)
        self.create(f"{CONTROL}/submissions/000000001.bound.json", {"uid": "u1"})
        self.add("start answered", key="nightly", run=RUN, uid="u1")
        self.create(f"{CONTROL}/attempts/prep/000000001.json", {"submission": 1})
        self.create(f"{CONTROL}/attempts/prep/000000001.end.json", {"attempt": 1, "outcome": "done"})
        self.claim(1, None)
        self.begin_pod(1)
        for step in (2, 4, 6):
            self.commit(1, step)
        self.add("pod ended", pod="pod-1", code=137)
        self.end(1, "failed")
        self.claim(2, (1, 6))
        self.begin_pod(2)
        self.add("restored", run=RUN, step="fit", attempt=2, at=6)
        self.delete_checkpoint(1, 2)
        self.commit(2, 8)
        self.add("pod ended", pod="pod-2", code=0)
        self.create(
            f"data/runs/{RUN}/outputs/fit/000000002/artifacts/model", checker.undisturbed_result(RUN), by="pod-2"
        )
        self.end(2, "done")
        self.create(f"{CONTROL}/submissions/000000001.end.json", {"status": "Succeeded"})
        self.add("workflow ended", name=RUN, uid="u1", status="Succeeded")
        self.add("over", settled=True)

    def add(self, event: str, by: str = "somebody", **fields: Any) -> None:
        self.history.append({"t": float(len(self.history)), "by": by, "event": event, **fields})

    def create(self, key: str, document: Any, by: str = "somebody") -> bytes:
        text = document if isinstance(document, str) else json.dumps(document)
        self.objects[key] = data = text.encode()
        self.add("create", by, key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest(), body=text)
        return data

    def claim(self, attempt: int, start: tuple[int, int] | None) -> None:
        starts_from = {"attempt": start[0], "global_step": start[1]} if start else None
        self.create(f"{ATTEMPTS}{attempt:09d}.json", {"submission": 1, "uid": "u1", "starts_from": starts_from})

    def end(self, attempt: int, outcome: str, by: str = "somebody") -> None:
        document = {"attempt": attempt, "outcome": outcome, "submission": 1}
        self.create(f"{ATTEMPTS}{attempt:09d}.end.json", document, by)

    def begin_pod(self, attempt: int, name: str = "", uid: str = "u1") -> None:
        fields = {"run": RUN, "step": "fit", "attempt": attempt, "gpus": 4, "uid": uid}
        self.add("pod started", pod=name or f"pod-{attempt}", **fields)

    def commit(self, attempt: int, step: int, *, shard_first: bool = True, looks: bool = True) -> None:
        by, data = f"pod-{attempt}", f"weights of {step}"
        key = f"{LINEAGE}/shards/{attempt:09d}-{step:015d}/00000"
        digest = hashlib.sha256(data.encode()).hexdigest()
        manifest = {"shards": [{"key": key, "size": len(data), "sha256": digest}]}
        writes = [lambda: self.create(key, data, by), lambda: self.create(manifest_key(attempt, step), manifest, by)]
        writes[not shard_first]()
        if looks:
            self.add("list", by, prefix=ATTEMPTS, page=0)
        writes[shard_first]()
        fields = {"run": RUN, "step": "fit", "attempt": attempt, "global_step": step}
        self.add("acknowledged", by, lineage=f"{RUN}/fit", **fields)

    def delete(self, key: str) -> None:
        del self.objects[key]
        self.add("delete", key=key)

    def delete_checkpoint(self, attempt: int, step: int) -> None:
        self.delete(manifest_key(attempt, step))
        self.delete(f"{LINEAGE}/shards/{attempt:09d}-{step:015d}/00000")

    def before(self, event: str, change: Change, **fields: Any) -> None:
        """Have ``change`` happen before the first event like this one."""
        at = next(index for index, found in enumerate(self.history) if matches(found, {"event": event, **fields}))
        later, self.history = self.history[at:], self.history[:at]
        change(self)
        self.history += later

    def without(self, event: str, **fields: Any) -> None:
        """Leave out the events like this one."""
        self.history = [found for found in self.history if not matches(found, {"event": event, **fields})]

    def laws(self) -> set[str]:
        return {law for law, _ in checker.check(copy.deepcopy(self.history), dict(self.objects)).violations}


def matches(event: dict[str, Any], fields: dict[str, Any]) -> bool:
    return all(event.get(name) == value for name, value in fields.items())


def manifest_key(attempt: int, step: int) -> str:
    return f"{LINEAGE}/manifests/{10**9 - 1 - attempt:09d}-{10**15 - 1 - step:015d}.json"


def add_second_workflow(story: Story) -> None:
    story.add("workflow created", name=RUN, uid="u2", run=RUN, submission=1)


def start_elsewhere(story: Story, start: tuple[int, int] | None) -> None:
    """The second attempt starts from something else."""
    starts_from = {"attempt": start[0], "global_step": start[1]} if start else None
    for event in story.history:
        if event["event"] == "create" and event["key"] == f"{ATTEMPTS}000000002.json":
            event["body"] = json.dumps({"submission": 1, "uid": "u1", "starts_from": starts_from})


def late_commit(story: Story, *, looks: bool) -> None:
    """The first attempt commits after its end."""
    story.before("create", lambda now: now.commit(1, 10, looks=looks), key=f"{ATTEMPTS}000000002.json")


PINNED = {"lineage": f"{RUN}/fit", "attempt": 1, "global_step": 2, "name": "keep"}
PIN_KEY = manifest_key(1, 2).replace("manifests", "pins").replace(".json", "/keep.json")
SECOND_END = f"{ATTEMPTS}000000002.end.json"


def end_before_pod(story: Story) -> None:
    story.before("pod ended", lambda now: now.end(1, "fenced", by="plugin-1-1"), pod="pod-1")


def delete_open(now: Story) -> None:
    now.delete(OPEN)


BROKEN: list[tuple[str, str, Change]] = [
    ("acknowledged", "starts too low", lambda story: start_elsewhere(story, (1, 4))),
    ("acknowledged", "starts from the beginning", lambda story: start_elsewhere(story, None)),
    (
        "acknowledged",
        "restores less",
        lambda story: story.before("restored", lambda now: now.add("restored", run=RUN, step="fit", attempt=2, at=4)),
    ),
    ("acknowledged", "told without a manifest", lambda story: story.without("create", key=manifest_key(2, 8))),
    (
        "commit",
        "manifest before its shard",
        lambda story: story.before("pod ended", lambda now: now.commit(2, 10, shard_first=False), pod="pod-2"),
    ),
    ("commit", "after an end that it could see", lambda story: late_commit(story, looks=True)),
    (
        "commit",
        "without a look at the fence",
        lambda story: story.before("pod ended", lambda now: now.commit(2, 10, looks=False), pod="pod-2"),
    ),
    ("commit", "starts from what does not count", lambda story: start_elsewhere(story, (5, 9))),
    (
        "retention",
        "one of the newest goes",
        lambda story: story.before("restored", lambda now: now.delete(manifest_key(1, 4))),
    ),
    ("retention", "a pinned one goes", lambda story: story.before("delete", lambda now: now.add("pinned", **PINNED))),
    (
        "retention",
        "a start goes",
        lambda story: story.before("pod started", lambda now: now.delete_checkpoint(1, 6), pod="pod-2"),
    ),
    (
        "retention",
        "shards go before their manifest",
        lambda story: story.before(
            "delete", lambda now: now.add("delete", key=f"{LINEAGE}/shards/000000001-000000000000002/00000")
        ),
    ),
    ("retention", "a claim goes", lambda story: story.delete(f"{ATTEMPTS}000000001.json")),
    (
        "quota",
        "three pods of four GPUs",
        lambda story: story.before(
            "pod ended", lambda now: [now.begin_pod(1, "second"), now.begin_pod(1, "third")], pod="pod-1"
        ),
    ),
    (
        "submission",
        "a second Workflow",
        lambda story: story.before("workflow ended", add_second_workflow),
    ),
    (
        "submission",
        "a pod of a Workflow that no submission is bound to",
        lambda story: [
            add_second_workflow(story),
            story.create(f"{ATTEMPTS}000000003.json", {"submission": 1, "uid": "u2"}),
            story.begin_pod(3, uid="u2"),
        ],
    ),
    (
        "submission",
        "two Workflows at once",
        lambda story: story.before(
            "workflow ended", lambda now: now.add("workflow created", name="b", uid="u2", run=RUN, submission=2)
        ),
    ),
    (
        "submission",
        "a pod of another Workflow than the one that claimed the attempt",
        lambda story: story.before("pod ended", lambda now: now.begin_pod(2, "other", "u2"), pod="pod-2"),
    ),
    ("submission", "two answers", lambda story: story.add("start answered", key="nightly", run=RUN, uid="u2")),
    ("submission", "a key without a run", lambda story: story.without("start answered")),
    ("end", "an attempt without an end", lambda story: story.objects.pop(SECOND_END)),
    (
        "end",
        "an end while the pod runs",
        lambda story: story.before("create", lambda now: now.begin_pod(2, "again"), key=SECOND_END),
    ),
    ("end", "an end by a service while the pod of a stopped Workflow runs", lambda story: end_before_pod(story)),
    (
        "end",
        "done twice",
        lambda story: story.create(f"{ATTEMPTS}000000001.end.json", {"attempt": 1, "outcome": "done"}),
    ),
    (
        "end",
        "another result",
        lambda story: story.create(f"data/runs/{RUN}/outputs/fit/000000002/artifacts/model", "0" * 64),
    ),
    ("end", "not settled", lambda story: story.without("over")),
    ("end", "a successor before the end", lambda story: story.without("create", key=f"{ATTEMPTS}000000001.end.json")),
    ("object", "a run that nothing lists", lambda story: story.delete(NEWEST)),
    ("object", "an open submission that nothing lists", lambda story: story.before("workflow created", delete_open)),
    (
        "object",
        "a claim before its marker",
        lambda story: story.before("create", delete_open, key=f"{CONTROL}/submissions/000000001.json"),
    ),
    ("object", "unknown key", lambda story: story.create("control/runs/stray", {})),
    (
        "object",
        "shard without manifest",
        lambda story: story.create(f"{LINEAGE}/shards/000000002-000000000000007/00000", "left"),
    ),
    (
        "object",
        "damaged shard",
        lambda story: story.objects.update({f"{LINEAGE}/shards/000000002-000000000000008/00000": b"damaged"}),
    ),
    (
        "object",
        "pin without checkpoint",
        lambda story: [story.create(PIN_KEY, {}), story.before("delete", lambda now: now.add("pinned", **PINNED))],
    ),
    (
        "object",
        "end without a claim",
        lambda story: story.create(f"{ATTEMPTS}000000007.end.json", {"attempt": 7, "outcome": "failed"}),
    ),
]


def test_checker_finds_nothing_in_a_healthy_history():
    story = Story()
    verdict = checker.check(story.history, story.objects)
    assert verdict.violations == []
    assert (verdict.acknowledged, verdict.lost, verdict.late) == (4, 0, 0)


@pytest.mark.parametrize(("law", "change"), [(law, change) for law, _, change in BROKEN], ids=[b[1] for b in BROKEN])
def test_checker_names_the_law_that_a_planted_history_breaks(law, change):
    story = Story()
    change(story)
    assert law in story.laws()


def test_checker_counts_a_late_commit_and_does_not_expect_it():
    """The attempt looked before its end was recorded; no store can exclude that, and the commit does not count."""
    story = Story()

    def look_end_commit(now: Story) -> None:
        now.commit(1, 10, looks=False)
        commit = now.history.pop(-2)
        look = {"t": 0.0, "by": "pod-1", "event": "list", "prefix": ATTEMPTS, "page": 0}
        end = next(event for event in now.history if event.get("key") == f"{ATTEMPTS}000000001.end.json")
        now.history.remove(end)
        told = now.history.pop()
        now.history += [look, end, commit, told]

    story.before("create", look_end_commit, key=f"{ATTEMPTS}000000002.json")
    verdict = checker.check(story.history, story.objects)
    assert verdict.violations == []
    assert (verdict.late, verdict.lost) == (1, 0)


def test_checker_counts_shards_of_a_last_save_that_failed():
    story = Story()
    story.create(f"{LINEAGE}/shards/000000002-000000000000009/00000", "left")
    verdict = checker.check(story.history, story.objects)
    assert (verdict.violations, verdict.left) == ([], 1)


def test_checker_counts_a_second_workflow_that_starts_nothing_once_the_first_is_over():
    story = Story()
    add_second_workflow(story)
    verdict = checker.check(story.history, story.objects)
    assert (verdict.violations, verdict.strays) == ([], 1)


def test_checker_lets_a_service_fence_what_runs_once_a_later_submission_has_taken_over():
    story = Story()
    story.before("create", lambda now: now.begin_pod(2, "again"), key=SECOND_END)
    end = next(event for event in story.history if event.get("key") == SECOND_END)
    end |= {"by": "plugin-1-1", "body": json.dumps({"attempt": 2, "outcome": "fenced", "submission": 1})}
    assert "end" in story.laws()
    story.before("pod started", lambda now: now.create(f"{CONTROL}/submissions/000000002.json", {}), pod="again")
    found = checker.check(story.history, story.objects).violations
    assert not [sentence for _, sentence in found if "while a pod of it ran" in sentence]


def test_checker_counts_faults_that_happened():
    story = Story()
    story.add("fault", kind="store down", number=1, process="")
    story.add("fault", kind="store down", number=2, process="")
    assert checker.check(story.history, story.objects).faults == {"store down": 2}


def test_checker_reads_a_folder(tmp_path: Path):
    story = Story()
    (tmp_path / "history.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in story.history))
    for key, data in story.objects.items():
        path = tmp_path / "bucket" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    history, objects = checker.read_folder(str(tmp_path))
    assert (history, objects) == (story.history, story.objects)


def test_checker_imports_nothing_of_tiphys():
    tree = ast.parse(Path(checker.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"hashlib", "json", "pathlib", "re", "sys", "collections"}
