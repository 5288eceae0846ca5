"""Several controllers at once, as processes: one Workflow per submission, and losers that know it."""

import multiprocessing
from collections import Counter
from pathlib import Path

import pytest
from support.compiled import History, gated, pipeline_of
from support.faults import dying_at
from support.submitter import FakeSubmitter
from tiphys_controller import resume_run, start_run

from tiphys.errors import ConflictError, TiphysError
from tiphys.store import DirectoryStore, read_submissions

RUN = "digits-1"
CONTROLLERS = 4
PIPELINE = pipeline_of(gated("prep"), gated("fit", depends="prep"))


def contend(folder: Path, ready: "multiprocessing.synchronize.Barrier", told: "multiprocessing.Queue[str]") -> None:
    store, submitter = DirectoryStore(folder / "store"), FakeSubmitter(folder / "cluster")
    ready.wait()
    try:
        told.put(f"submitted {resume_run(store, submitter, RUN).submission}")
    except ConflictError:
        told.put("refused")
    except TiphysError as error:
        told.put(repr(error))


def race(folder: Path) -> Counter[str]:
    """What each of several controllers answered that resume at the same moment."""
    context = multiprocessing.get_context("spawn")
    ready, told = context.Barrier(CONTROLLERS), context.Queue()
    processes = [context.Process(target=contend, args=(folder, ready, told)) for _ in range(CONTROLLERS)]
    for process in processes:
        process.start()
    answers = Counter(told.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(timeout=120)
    return answers


@pytest.fixture
def history(tmp_path: Path) -> History:
    """A run whose Workflow died while fit ran."""
    store, submitter = DirectoryStore(tmp_path / "store"), FakeSubmitter(tmp_path / "cluster")
    start_run(store, submitter, PIPELINE, RUN)
    history = History(store, RUN)
    history.done("prep")
    history.opened("fit")
    submitter.end(RUN)
    return history


def test_one_of_several_controllers_submits(tmp_path: Path, history: History) -> None:
    answers = race(tmp_path)

    assert set(answers) <= {"submitted 2", "refused"}
    assert answers["submitted 2"] >= 1
    assert FakeSubmitter(tmp_path / "cluster").names() == [RUN, f"{RUN}-2"]
    bound = [submission.binding for submission in read_submissions(history.store, RUN)]
    assert [one.uid for one in bound if one] == [f"uid-of-{RUN}", f"uid-of-{RUN}-2"]


def test_a_submission_that_somebody_died_in_is_completed_once(tmp_path: Path, history: History) -> None:
    with dying_at("resume.after_claim"):
        resume_run(history.store, FakeSubmitter(tmp_path / "cluster"), RUN)

    answers = race(tmp_path)

    assert set(answers) <= {"submitted 2", "refused"}
    assert answers["submitted 2"] >= 1
    assert FakeSubmitter(tmp_path / "cluster").names() == [RUN, f"{RUN}-2"]
    last = read_submissions(history.store, RUN)[-1]
    assert last.binding is not None
    assert last.binding.uid == f"uid-of-{RUN}-2"
