"""What controllers are asked for while they die: stories that threads and processes tell alike."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from tiphys_controller import Submitter, WorkflowChange, fork_run, resume_run, start_run

from support.builders.compiled_workflows import History, gated, pipeline_of
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.store import Store, list_runs, read_run, read_submissions

RUN = "digits-1"
PIPELINE = pipeline_of(gated("prep"), gated("fit", depends="prep"), gated("report", depends="fit"))
REPAIRED = copy.deepcopy(PIPELINE)
next(one for one in REPAIRED["spec"]["templates"] if one["name"] == "fit-run")["container"]["image"] = "python:3.13"
CHANGE = WorkflowChange(REPAIRED)
SENT = ("after_claim", "after_create", "after_bind")

Ask = Callable[[Store, Submitter], Any]


class Story(NamedTuple):
    """Something that is asked for, the points at which it can die, and how a person goes on after that."""

    verb: str
    points: tuple[str, ...]
    ask: Ask
    go_on: Ask
    new: str
    """The Workflow that there is one of in the end."""


class Cluster(Protocol):
    """What a test sees of the Workflows that there are."""

    def names(self) -> Sequence[str]:
        """Of all, sorted."""

    def uid(self, name: str) -> str:
        """Which object has the name."""

    def manifest(self, name: str) -> dict[str, Any]:
        """The Workflow as it was created."""


def _resume(**given: Any) -> Ask:
    return lambda store, submitter: resume_run(store, submitter, RUN, **given)


def _start(store: Store, submitter: Submitter) -> Any:
    return start_run(store, submitter, PIPELINE, "new", key="nightly")


def _fork(store: Store, submitter: Submitter) -> Any:
    return fork_run(store, submitter, RUN, "new", rerun=["fit"], change=CHANGE)


def _fork_once(store: Store, submitter: Submitter) -> Any:
    return fork_run(store, submitter, RUN, "new", rerun=["fit"], change=CHANGE, key="hot")


STORIES = {
    "resume": Story("resume", ("after_fence", *SENT), _resume(), _resume(), f"{RUN}-2"),
    "from": Story("resume", ("after_fence", *SENT), _resume(rerun=["fit"]), _resume(rerun=["fit"]), f"{RUN}-2"),
    "change": Story(
        "resume", ("after_fence", "after_workflow", *SENT), _resume(change=CHANGE), _resume(change=CHANGE), f"{RUN}-2"
    ),
    "key": Story("resume", ("after_fence", *SENT), _resume(key="alert"), _resume(key="alert"), f"{RUN}-2"),
    "start": Story("start", ("after_key", "after_record", *SENT), _start, _start, "new"),
    "fork": Story(
        "start", ("after_record", *SENT), _fork, lambda store, submitter: resume_run(store, submitter, "new"), "new"
    ),
    "fork-key": Story("start", ("after_key", "after_record", *SENT), _fork_once, _fork_once, "new"),
}


def failed_run(store: Store, submitter: Submitter, manifest: Manifest = PIPELINE, namespace: str = "default") -> None:
    """A run whose report failed; its Workflow still has to be ended."""
    start_run(store, submitter, manifest, RUN, namespace)
    done = History(store, RUN)
    done.done("prep")
    done.done("fit")
    done.opened("report")


def check(name: str, story: Story, store: Store, cluster: Cluster) -> None:
    """One Workflow more than before, bound, and doing what was asked."""
    assert list(cluster.names()) == sorted([RUN, story.new])
    assert set(list_runs(store)) == {RUN} | ({"new"} if story.new == "new" else set())
    last = read_submissions(store, "new" if story.new == "new" else RUN)[-1]
    assert last.binding is not None
    assert (last.binding.workflow_name, last.binding.uid) == (story.new, cluster.uid(story.new))
    manifest = cluster.manifest(story.new)
    tasks = [task["name"] for task in manifest["spec"]["templates"][0]["dag"]["tasks"]]
    images = {one["container"]["image"] for one in manifest["spec"]["templates"] if one["name"] == "fit-run"}
    expected = {"resume": ["report"], "key": ["report"], "from": ["fit", "report"]}.get(name)
    assert tasks == (expected or (["report"] if name == "change" else ["prep", "fit", "report"]))
    if name == "from":
        assert last.claim.rerun_since == {"fit": 2, "report": 2}
    if name == "change":
        assert store.list(f"control/runs/{RUN}/workflows/{last.claim.workflow}.json")
    if name.startswith("fork"):
        assert (read_run(store, "new").parent, images) == (RUN, {"python:3.13"})
        assert last.claim.rerun_since == {"fit": 1, "report": 1}
