"""What an author says about changes travels with the Workflow, and so with its runs."""

import pytest

from hera_pipelines import CronPipeline, Drift, Pipeline, Step
from tiphys.errors import UsageError
from tiphys.protocol.drift_policy import DRIFT_ANNOTATION, DriftAction, DriftPolicy, read_drift_policy


def authored(drift: Drift | None) -> Pipeline:
    with Pipeline("digits", store="s3://ml-runs/tiphys", drift=drift) as pipeline:
        Step(name="prep", image="prep", command=["prep"])()
    return pipeline


def test_a_drift_policy_is_stored_with_defaults_for_the_rest():
    policy = read_drift_policy(authored(Drift(image="refuse", parameters="allow")).compile())
    assert policy == DriftPolicy(image=DriftAction.REFUSE, parameters=DriftAction.ALLOW)


def test_a_pipeline_without_drift_policy_stores_none_and_gets_the_default():
    manifest = authored(None).compile()
    assert DRIFT_ANNOTATION not in manifest["metadata"]["annotations"]
    assert read_drift_policy(manifest) == DriftPolicy()


def test_runs_of_a_cron_workflow_have_it_too():
    drift = Drift(code="refuse")
    with CronPipeline("nightly", schedules=["0 2 * * *"], store="s3://ml-runs/t", drift=drift) as pipeline:
        Step(name="prep", image="prep", command=["prep"])()
    assert read_drift_policy(pipeline.workflow()).code is DriftAction.REFUSE


def test_an_action_that_there_is_not_is_named():
    with pytest.raises(UsageError, match=r"drift image=perhaps is not valid: .* actions allow, warn, fork, refuse"):
        authored(Drift(image="perhaps")).compile()  # type: ignore[arg-type]


def test_a_damaged_annotation_is_named():
    with pytest.raises(UsageError, match=r"annotation tiphys\.dev/drift is damaged"):
        read_drift_policy({"metadata": {"annotations": {DRIFT_ANNOTATION: "{"}}})
