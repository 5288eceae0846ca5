"""What a claim says about the parameters and the data that its attempt works on, for the facts of checkpoints."""

import pytest
from support.world import Flow, World, fit, workflow, world

from tiphys.protocol.step_spec import CODE_VERSION_ANNOTATION
from tiphys.records import AttemptClaim
from tiphys.store import read_run, read_step_attempts


@pytest.fixture
def here(tmp_path) -> World:
    return world(tmp_path)


def test_a_claim_holds_digests_of_parameters_and_data_that_change_with_them_alone(here):
    def claimed(name: str, lr: str, artifact: str) -> AttemptClaim:
        flow = here.submit(fit(), name=name, uid=f"uid-{name}")
        flow.admit("fit", 0, inputs={"lr": lr}, artifacts=[{"name": "data", "s3": {"key": artifact}}])
        [attempt] = read_step_attempts(here.store, name, "fit")
        return attempt.claim

    one, hotter, other = claimed("a", "0.1", "raw/1"), claimed("b", "0.2", "raw/1"), claimed("c", "0.1", "raw/2")
    assert (one.dataset == hotter.dataset, one.parameters == hotter.parameters) == (True, False)
    assert (one.dataset == other.dataset, one.parameters == other.parameters) == (False, True)
    assert len({one.step_key, hotter.step_key, other.step_key}) == 3
    assert [len(digest) for digest in (one.parameters, one.dataset)] == [64, 64]


def test_a_step_without_input_artifacts_has_no_data_to_be_known_by(here):
    here.submit(fit()).admit("fit", 0)
    [attempt] = read_step_attempts(here.store, "digits-abc12", "fit")
    assert attempt.claim.dataset == ""


@pytest.mark.parametrize("commit", ["c0ffee-dirty", None])
def test_the_record_of_a_run_says_which_code_was_compiled_if_its_workflow_does(here, commit):
    document = workflow([fit()])
    if commit:
        document["metadata"]["annotations"][CODE_VERSION_ANNOTATION] = commit
    here.cluster.write_workflow(document)
    Flow(here, "digits-abc12", "uid-1").admit("fit", 0)
    assert read_run(here.store, "digits-abc12").code_version == commit
