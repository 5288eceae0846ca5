"""A fork takes over what its parent has finished, and its trainings go on from the parent's checkpoints.

| step of the fork                                   | admit                                                 |
|----------------------------------------------------|-------------------------------------------------------|
| done in the parent under the same step key         | adopted from it                                       |
| done in the parent's parent only                   | adopted from that                                     |
| done under another key, or asked to run again      | runs                                                  |
| asked to run again in the parent, and not done yet | runs: older results of the parent count no more       |
| a training with checkpoints in the parent          | starts from the newest valid one, which gets a pin    |
| a training that the fork has tried already         | goes on from its own, then from where it began        |
| a training that was asked to run again             | starts from the beginning                             |
"""

import copy

import pytest
from support.stories.plugin import Flow, World, artifacts, commit, fit, outputs, phase, prep, said, workflow

from tiphys.errors import StoreError
from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.lineage.retention.delete import Tombstones
from tiphys.lineage.retention.gc import RunLineage, iter_run_lineages
from tiphys.lineage.retention.policy import list_pins
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.tree import read_lineage_tree
from tiphys.records import CheckpointRef, RunRecord, SubmissionClaim, SubmissionKind, utc_now
from tiphys.store import RunLayout, claim_record, read_step_attempts

PARENT = "digits-abc12"
STEP = prep(parameters=())


def forked(here: World, name: str, *specs, parent: str = PARENT, fresh: tuple[str, ...] = ()) -> Flow:
    """A run as `tiphys fork` makes it."""
    live = workflow(list(specs), name, f"uid-{name}")
    document = copy.deepcopy({key: live[key] for key in ("apiVersion", "kind", "metadata", "spec")})
    record = RunRecord(run=name, pipeline="digits", workflow=document, digest="d", parent=parent, rerun_steps=fresh)
    claim_record(here.store, RunLayout(name).run_record, record)
    wanted = SubmissionClaim(
        run=name,
        submission=1,
        kind=SubmissionKind.FORK,
        workflow_name=name,
        namespace="ml",
        rerun_since=dict.fromkeys(fresh, 1),
    )
    claim_record(here.store, RunLayout(name).submission(1), wanted)
    flow = here.submit(*specs, name=name, uid=f"uid-{name}")
    flow.run, flow.submission = name, "1"
    return flow


def finish(flow: Flow, **fields) -> str:
    """Run `prep` to its end; the key of its artifact."""
    reply = flow.admit("prep", **fields)
    assert outputs(reply)["run"] == "true", reply
    key = flow.write_output(reply, "0/artifacts/data", b"rows")
    assert phase(flow.conclude("prep")) == "Succeeded"
    return key


def trained(here: World, steps: tuple[int, ...] = (900, 1000)) -> Flow:
    """The parent: a training that saved and died."""
    flow = here.submit(fit())
    flow.admit("fit", 0)
    for step in steps:
        commit(here.store, f"{PARENT}/fit", attempt=1, step=step)
    flow.pod("fit", 1, phase="Failed", exit_code=1)
    flow.end_try("fit", 0, exit_code="1")
    return flow


def ref(step: int, attempt: int = 1, run: str = PARENT) -> CheckpointRef:
    return CheckpointRef(lineage=f"{run}/fit", attempt=attempt, global_step=step)


def test_a_finished_step_of_the_parent_is_adopted(here):
    key = finish(here.submit(STEP), inputs={"n": "1"})
    fork = forked(here, "hot", STEP)
    assert said(fork.admit("prep", inputs={"n": "1"})) == f"Adopted from run {PARENT}, step prep, attempt 1"
    assert artifacts(fork.conclude("prep", status="Skipped", exit_code="-1")) == {"data": key}


def test_an_adopted_item_is_named_without_the_hash_in_its_step_id(here):
    sweep = STEP.model_copy(update={"name": "sweep", "fan_out": True})
    parent = here.submit(sweep)
    parent.write_output(parent.admit("sweep", item="0:a"), "0/artifacts/data", b"a")
    parent.conclude("sweep", item="0:a")
    reply = forked(here, "hot", sweep).admit("sweep", item="0:a")
    assert said(reply) == f"Adopted from run {PARENT}, step sweep, attempt 1"


def test_any_generation_up_is_looked_at(here):
    finish(here.submit(STEP))
    forked(here, "hot", STEP).admit("prep")
    assert f"from run {PARENT}" in said(forked(here, "hotter", STEP, parent="hot").admit("prep"))


@pytest.mark.parametrize("given", [{"inputs": {"n": "2"}}, {}])
def test_a_step_with_other_inputs_or_a_forced_rerun_runs(here, given):
    finish(here.submit(STEP), inputs={"n": "1"})
    fork = forked(here, "hot", STEP, fresh=() if given else ("prep",))
    assert outputs(fork.admit("prep", **(given or {"inputs": {"n": "1"}})))["run"] == "true"


def test_a_result_that_the_parent_was_asked_to_make_anew_is_not_reused(here):
    finish(here.submit(STEP))
    again = SubmissionClaim(
        run=PARENT,
        submission=2,
        kind=SubmissionKind.RESUME,
        workflow_name=f"{PARENT}-2",
        namespace="ml",
        rerun_since={"prep": 2},
    )
    claim_record(here.store, RunLayout(PARENT).submission(2), again)
    assert outputs(forked(here, "hot", STEP).admit("prep"))["run"] == "true"


def test_a_result_that_the_parent_makes_anew_is_not_reused_from_its_own_parent(here):
    finish(here.submit(STEP))
    forked(here, "hot", STEP, fresh=("prep",))
    assert outputs(forked(here, "hotter", STEP, parent="hot").admit("prep"))["run"] == "true"


def test_a_parent_that_is_gone_leaves_everything_to_do(here):
    assert outputs(forked(here, "hot", STEP, parent="gone").admit("prep"))["run"] == "true"


def test_training_starts_from_the_newest_checkpoint_of_the_parent(here):
    trained(here)
    reply = forked(here, "hot", fit()).admit("fit", 0)
    answer = outputs(reply)
    assert (answer["attempt"], answer["lineage"]) == ("1", "hot/fit")
    assert answer["resume-from"] == f"{PARENT}/fit/1-1000"
    assert answer["checkpoint-uri"].endswith(f"/data/lineages/{PARENT}/fit/shards/000000001-{1000:015d}/")
    assert said(reply) == f"Attempt 1 resumes from step 1000 (checkpoint of attempt 1 of {PARENT}/fit, to be verified)"


def test_a_checkpoint_that_is_being_deleted_starts_no_attempt(here):
    trained(here)
    Tombstones(here.store, f"{PARENT}/fit", utc_now).announce_deletion([ref(900), ref(1000)])
    with pytest.raises(StoreError, match="each of 3 checkpoints that fit could start from was removed"):
        forked(here, "hot", fit()).admit("fit", 0)
    assert read_step_attempts(here.store, "hot", "fit") == []


def test_a_quarantined_checkpoint_of_the_parent_is_skipped_and_named(here):
    trained(here)
    quarantine_checkpoint(here.store, ref(1000), "bit rot", by="verify")
    reply = forked(here, "hot", fit()).admit("fit", 0)
    assert outputs(reply)["resume-from"] == f"{PARENT}/fit/1-900"
    assert "1000 of attempt 1 was skipped" in said(reply)


def test_the_checkpoint_that_a_fork_began_with_stays_in_its_parent(here):
    trained(here, tuple(range(100, 1001, 100)))
    forked(here, "hot", fit()).admit("fit", 0)
    for step in range(1100, 1600, 100):
        commit(here.store, f"{PARENT}/fit", attempt=1, step=step)
    keep = lambda policy: policy.model_copy(update={"delay_seconds": 0.0})  # noqa: E731
    [lineage] = iter_run_lineages(RunHistory(here.store, PARENT), keep)
    assert isinstance(lineage, RunLineage)
    kept = {fate.checkpoint.global_step: fate.reasons for fate in lineage.collect().decisions if fate.reasons}
    assert kept[1000] == ("pinned fork-hot",)
    assert 900 not in kept


def test_a_fork_goes_on_from_its_own_checkpoints_and_back_to_where_it_began(here):
    trained(here)
    fork = forked(here, "hot", fit())
    fork.admit("fit", 0)
    fork.pod("fit", 1, phase="Failed", exit_code=75)
    assert "attempt 2 resumes from step 1000" in said(fork.end_try("fit", 0, exit_code="75"))
    assert outputs(fork.admit("fit", 1))["resume-from"] == f"{PARENT}/fit/1-1000"
    commit(here.store, "hot/fit", attempt=2, step=1100)
    fork.pod("fit", 2, retry=1, phase="Failed", exit_code=75)
    fork.end_try("fit", 1, exit_code="75")
    assert outputs(fork.admit("fit", 2))["resume-from"] == "2-1100"
    quarantine_checkpoint(here.store, ref(1100, 2, "hot"), "bit rot", by="verify")
    fork.pod("fit", 3, retry=2, phase="Failed", exit_code=75)
    fork.end_try("fit", 2, exit_code="75")
    assert outputs(fork.admit("fit", 3))["resume-from"] == f"{PARENT}/fit/1-1000"
    assert list_pins(here.store, f"{PARENT}/fit") == {ref(1000): ("fork-hot",)}


def test_a_fork_of_a_fork_that_saved_nothing_begins_where_that_began(here):
    trained(here)
    forked(here, "hot", fit()).admit("fit", 0)
    assert outputs(forked(here, "hotter", fit(), parent="hot").admit("fit", 0))["resume-from"] == f"{PARENT}/fit/1-1000"


def test_a_training_that_is_asked_for_anew_starts_from_the_beginning(here):
    trained(here)
    assert outputs(forked(here, "hot", fit(), fresh=("fit",)).admit("fit", 0))["resume-from"] == ""


def test_the_lineage_tells_where_it_comes_from(here):
    trained(here)
    forked(here, "hot", fit()).admit("fit", 0)
    [step] = read_lineage_tree(RunHistory(here.store, "hot")).steps
    assert step.attempts[0].starts_from == ref(1000)
    assert step.attempts[0].checkpoints == ()
    assert read_step_attempts(here.store, "hot", "fit")[0].claim.lineage == "hot/fit"
