"""``-p name=value`` changes the named parameter and nothing else."""

import pytest

from hera_pipelines.cli.shared_options import parse_parameters, require_values, with_parameters
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest, read_workflow_parameters


def workflow(*parameters: dict[str, object]) -> Manifest:
    return {"spec": {"entrypoint": "main", "arguments": {"parameters": list(parameters)}}}


def test_values_may_hold_equals_signs_and_be_empty() -> None:
    assert parse_parameters(["lr=0.1", "query=a=b", "note="]) == {"lr": "0.1", "query": "a=b", "note": ""}


@pytest.mark.parametrize("text", ["lr", "=0.1", ""])
def test_a_parameter_without_value_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not NAME=VALUE; write, for example, -p lr=0.1"):
        parse_parameters([text])


def test_a_given_value_replaces_the_default_and_others_stay() -> None:
    manifest = workflow({"name": "lr", "value": "0.1"}, {"name": "seed", "value": "7"})
    assert read_workflow_parameters(with_parameters(manifest, {"lr": "0.3"})) == {"lr": "0.3", "seed": "7"}
    assert read_workflow_parameters(manifest) == {"lr": "0.1", "seed": "7"}


def test_an_unknown_parameter_is_refused_with_those_there_are() -> None:
    manifest = workflow({"name": "lr", "value": "0.1"}, {"name": "tiphys-run", "value": ""})
    with pytest.raises(UsageError, match=r"no parameter 'rate'; it has: lr$"):
        with_parameters(manifest, {"rate": "0.3"})


def test_a_pipeline_without_parameters_says_so() -> None:
    with pytest.raises(UsageError, match="it has: none"):
        with_parameters({"spec": {"entrypoint": "main"}}, {"rate": "0.3"})


def test_a_parameter_left_without_a_value_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'lr' has no value; give one with -p lr="):
        require_values(workflow({"name": "lr"}))


@pytest.mark.parametrize("filled", [{"value": ""}, {"valueFrom": {"configMapKeyRef": {"name": "c", "key": "lr"}}}])
def test_a_parameter_with_a_value_or_a_source_of_one_is_complete(filled: dict[str, object]) -> None:
    require_values(workflow({"name": "lr", **filled}))


def test_the_workflow_within_a_cron_workflow_takes_the_values() -> None:
    cron: Manifest = {"spec": {"schedules": ["@daily"], "workflowSpec": workflow({"name": "lr"})["spec"]}}
    filled = with_parameters(cron, {"lr": "0.3"})
    assert filled["spec"]["workflowSpec"]["arguments"]["parameters"] == [{"name": "lr", "value": "0.3"}]
