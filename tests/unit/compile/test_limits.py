"""Open plugin nodes never outgrow one WorkflowTaskSet."""

from typing import Any

import pytest
from support.builders.authored_workflows import by_name, gated, parameters, step, task, train, workflow

from hera_pipelines.compile import CompileOptions, compile_workflow
from hera_pipelines.compile.retries import TASK_SET_BYTES
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest

OPTIONS = CompileOptions(store="s3://ml-runs/tiphys")


def entry(entry_fields: Manifest | None = None, **fan_out: Any) -> Manifest:
    tasks = [task("sweep", "fit", **fan_out)]
    manifest = workflow(train(), tasks=tasks, entry=entry_fields, arguments=parameters("items"))
    return by_name(compile_workflow(manifest, OPTIONS))["main"]


def test_a_small_fan_out_is_not_limited() -> None:
    assert "parallelism" not in entry(withItems=list(range(50)))


@pytest.mark.parametrize(
    "fan_out",
    [
        {"withItems": list(range(5000))},
        {"withParam": "{{workflow.parameters.items}}"},
        {"withSequence": {"count": "9"}},
    ],
    ids=lambda fan_out: next(iter(fan_out)),
)
def test_a_large_or_unknown_fan_out_is_limited(fan_out: Manifest) -> None:
    assert 50 < entry(**fan_out)["parallelism"] < 1000


def test_the_limit_leaves_room_in_the_task_set() -> None:
    manifest = compile_workflow(workflow(train(), tasks=[task("sweep", "fit", withParam="[]")]), OPTIONS)
    bodies = max(len(str(t)) for t in manifest["spec"]["templates"] if "plugin" in t)

    assert by_name(manifest)["main"]["parallelism"] * bodies < TASK_SET_BYTES


def test_large_items_lower_the_limit() -> None:
    small = entry(withItems=["x"] * 5000)["parallelism"]
    large = entry(withItems=["x" * 4000] * 5000)["parallelism"]

    assert large < small / 2


def limit(value: str, **spec: Any) -> int:
    """parallelism of a fan-out over many items, each given ``value`` beside."""
    arguments = {"parameters": [{"name": "lr", "value": value}]}
    program = train(inputs=parameters("lr"), container={"args": ["{{workflow.parameters.used}}"]})
    manifest = workflow(program, tasks=[task("sweep", "fit", withParam="[]", arguments=arguments)], **spec)
    return int(by_name(compile_workflow(manifest, OPTIONS))["main"]["parallelism"])


def given(used: str = "", passed: str = "") -> Manifest:
    return {"parameters": [{"name": "used", "value": used}, {"name": "passed", "value": passed}]}


def test_large_values_lower_the_limit_however_they_arrive() -> None:
    small = limit("x", arguments=given())
    passed = "{{workflow.parameters.passed}}"

    assert limit("x" * 50_000, arguments=given()) < small / 5
    assert limit(passed, arguments=given(passed="x" * 50_000)) < small / 5
    assert limit("x", arguments=given(used="x" * 50_000)) < small / 3
    assert limit("x", arguments=given(passed="x" * 50_000)) == small


def test_a_value_that_fills_the_task_set_is_refused() -> None:
    with pytest.raises(UsageError, match="pass large values as artifacts"):
        limit("x" * TASK_SET_BYTES, arguments=given())


def test_a_lower_limit_of_the_author_is_kept() -> None:
    assert entry({"parallelism": 4}, withParam="[]")["parallelism"] == 4


def test_a_higher_limit_of_the_author_is_refused_where_it_could_matter() -> None:
    with pytest.raises(UsageError, match=r"'main': parallelism 5000 would open more .* set it to \d+ or less"):
        entry({"parallelism": 5000}, withParam="[]")
    assert entry({"parallelism": 5000}, withItems=[1, 2])["parallelism"] == 5000


def test_an_item_that_fills_the_task_set_is_refused() -> None:
    with pytest.raises(UsageError, match="pass large values as artifacts"):
        entry(withItems=["x" * TASK_SET_BYTES])


@pytest.mark.parametrize(("kind", "is_limited"), [(gated, True), (step, False)])
def test_many_single_steps_count_too_unless_they_ask_no_plugin(kind: Any, is_limited: bool) -> None:
    names = [f"step-{number}" for number in range(1000)]
    manifest = workflow(kind(), tasks=[task(name, "prep") for name in names])

    limit = by_name(compile_workflow(manifest, OPTIONS))["main"].get("parallelism")
    assert (limit is not None and limit < 1000) is is_limited
