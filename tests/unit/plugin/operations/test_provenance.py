"""What a claim says about the parameters and the data that its attempt works on, for the facts of checkpoints."""

import pytest
from support.stories.plugin import Flow, fit, workflow

from tiphys.protocol.step_spec import CODE_VERSION_ANNOTATION
from tiphys.records import AttemptClaim, DataVersion
from tiphys.store import read_run, read_step_attempts


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


def test_versions_of_data_are_in_the_claim_and_change_the_digests_of_data_and_step_alone(here):
    def claimed(name: str, *data: DataVersion) -> AttemptClaim:
        here.submit(fit(data=data), name=name, uid=f"uid-{name}").admit("fit", 0, inputs={"lr": "0.1"})
        [attempt] = read_step_attempts(here.store, name, "fit")
        return attempt.claim

    def version(digest: str, **fields) -> DataVersion:
        return DataVersion(**{"name": "data/train", "algorithm": "md5", "digest": digest * 32, **fields})

    old, new, labels = version("a"), version("b"), version("c", name="labels")
    claims = [claimed("a"), claimed("b", old), claimed("c", new), claimed("d", old, labels)]
    assert [claim.data for claim in claims] == [(), (old,), (new,), (old, labels)]
    assert len({claim.step_key for claim in claims}) == len({claim.dataset for claim in claims}) == 4
    assert len({claim.parameters for claim in claims}) == 1
    # What DVC only counts, and the order, are not the content.
    same = claimed("e", labels, version("a", size_bytes=7, files=2))
    assert (same.step_key, same.dataset) == (claims[3].step_key, claims[3].dataset)


def test_a_branch_of_lakefs_stands_for_its_commit(here):
    def claimed(name: str, ref: str, commit: str) -> AttemptClaim:
        uri = f"lakefs://datasets/{commit}/x"
        data = DataVersion(name=f"lakefs://datasets/{ref}/x", algorithm="commit", digest=commit, uri=uri)
        here.submit(fit(data=(data,)), name=name, uid=f"uid-{name}").admit("fit", 0)
        [attempt] = read_step_attempts(here.store, name, "fit")
        return attempt.claim

    branch, tag, moved = claimed("a", "main", "c1"), claimed("b", "v1", "c1"), claimed("c", "main", "c2")
    assert branch.step_key == tag.step_key != moved.step_key


def test_the_key_of_a_step_never_changes_by_itself(here):
    """Another key is no error, but every step then runs once more."""
    flow = here.submit(fit())
    flow.admit("fit", 0, inputs={"lr": "0.1"}, artifacts=[{"name": "data", "s3": {"key": "raw/1"}}])
    [attempt] = read_step_attempts(here.store, "digits-abc12", "fit")
    assert attempt.claim.step_key == "b81e5d32ce6fd770f729383bcef303b8eba2d4f7bb9cfb1afc6a0761f5498019"
    assert attempt.claim.dataset == "3dbb9d91cdcc4337ff6f753219eed40edcc28bba36a1614b0257acc10b3b0cc9"


@pytest.mark.parametrize("commit", ["c0ffee-dirty", None])
def test_the_record_of_a_run_says_which_code_was_compiled_if_its_workflow_does(here, commit):
    document = workflow([fit()])
    if commit:
        document["metadata"]["annotations"][CODE_VERSION_ANNOTATION] = commit
    here.cluster.write_workflow(document)
    Flow(here, "digits-abc12", "uid-1").admit("fit", 0)
    assert read_run(here.store, "digits-abc12").code_version == commit
