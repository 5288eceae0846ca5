"""Names of steps and items: what is shown is accepted, and so is every other way to say it.

| where an item is known from | its name |
|---|---|
| the Workflow | its index there |
| a binding | the index in Argo's name of the first submission that ran it |
| bindings of which two have one such index, since the items have changed | the index of the newest submission |
| a binding whose label has no index | its step id |
"""

from typing import Any

import pytest
from support.builders.lineage import RUN

from tiphys.errors import NotFoundError, UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.step_names import StepNames, selects_step
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.fan_out import assign_item_ids
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION
from tiphys.records import (
    ItemBinding,
    RunRecord,
    SubmissionClaim,
    SubmissionKind,
    item_step_id,
    json_digest,
)
from tiphys.store import DirectoryStore, RunLayout

MAPS = [{"lr": 0.1, "width": 64}, {"lr": 0.1, "width": 128}, {"lr": 0.3, "width": 64}]
NESTED = [{"layers": [64, {"drop": 0.5}]}, [1, [2, "a (b)"]]]


def workflow(**fan_outs: Any) -> dict[str, Any]:
    """A Workflow with the step prep and these fan-outs: a list is withItems, a text withParam."""
    tasks = [
        {"name": name, "template": name, ("withParam" if isinstance(items, str) else "withItems"): items}
        for name, items in fan_outs.items()
    ]
    return {
        "metadata": {"annotations": {PIPELINE_ANNOTATION: "digits"}},
        "spec": {
            "entrypoint": "main",
            "templates": [{"name": "main", "dag": {"tasks": [{"name": "prep", "template": "prep"}, *tasks]}}],
        },
    }


def names(*bindings: ItemBinding, **fan_outs: Any) -> StepNames:
    return StepNames(RUN, CompiledPipeline.from_manifest(workflow(**fan_outs)), lambda: bindings)


def ids(step: str, items: list[Any]) -> list[str]:
    return [item.step_id for item in assign_item_ids(step, items)]


def binding(step: str, label: str, item: str = "", submission: int = 1) -> ItemBinding:
    return ItemBinding(run=RUN, submission=submission, step=step, instance=f"wf.{label}", label=label, item=item)


def test_every_item_is_accepted_under_the_name_that_is_shown():
    for items in ([0.1, 0.2, "a"], MAPS, NESTED, [2, 1, 0], ["x", "x", "y"]):
        known = names(fit=items)
        assert [known.name(step) for step in ids("fit", items)] == [f"fit[{i}]" for i in range(len(items))]
        assert [known.resolve(known.name(step)) for step in ids("fit", items)] == ids("fit", items)


@pytest.mark.parametrize(
    ("items", "typed", "index"),
    [
        ([0.1, 0.2], "fit[1]", 1),
        ([0.1, 0.2], "fit[0.2]", 1),
        ([0.1, 0.2], "fit[0.20]", 1),
        ([0.1, 0.2], "fit[item=0.2]", 1),
        ([0.1, 0.2], "fit(1:0.2)", 1),
        ([64, 128], "fit[128]", 1),  # no index
        ([1, 0], "fit[0]", 0),  # the index comes before the value
        (["a b", "c.d"], "fit[c.d]", 1),
        (MAPS, "fit[lr=0.3]", 2),
        (MAPS, "fit[width=128,lr=0.1]", 1),
        (MAPS, "fit[lr=0.1 width=128]", 1),
        (MAPS, 'fit[{"width": 128, "lr": 0.1}]', 1),
        (MAPS, "fit(1:lr:0.1,width:128)", 1),
        (NESTED, 'fit[{"layers":[64,{"drop":0.5}]}]', 0),
        (NESTED, 'fit[[1,[2,"a (b)"]]]', 1),
        (NESTED, "fit(1:[1 [2 a b]])", 1),
    ],
)
def test_an_item_has_one_meaning_under_each_of_its_names(items, typed, index):
    assert names(fit=items).resolve(typed) == ids("fit", items)[index]


def test_step_ids_stay_accepted():
    [first, second] = ids("fit", [0.1, 0.2])
    known = names(fit=[0.1, 0.2])
    assert [known.resolve(step) for step in (first, second.removesuffix(".0"))] == [first, second]
    removed = item_step_id("fit", "0.9", 0)
    assert (known.resolve(removed), known.name(removed)) == (removed, removed)


def test_the_name_of_a_step_is_its_own_and_selects_all_items():
    known = names(fit=[0.1, 0.2])
    assert (known.resolve("prep"), known.resolve("fit"), known.name("prep"), known.value("prep")) == (
        "prep",
        "fit",
        "prep",
        "",
    )
    first, second = ids("fit", [0.1, 0.2])
    assert [selects_step("fit", step) for step in (first, second, "prep")] == [True, True, False]
    assert [selects_step(first, step) for step in (first, second, "fit")] == [True, False, False]


@pytest.mark.parametrize(
    ("typed", "kind", "said"),
    [
        ("fat", NotFoundError, r"no step 'fat'; did you mean 'fit'\? It has: prep, fit"),
        ("fat[0]", NotFoundError, r"no step 'fat\[0\]'"),
        ("fit[3]", NotFoundError, r"fit has: fit\[0\] lr=0.1 width=64, fit\[1\] lr=0.1 width=128, fit\[2\] lr=0.3"),
        ("fit(0:lr:0.3,width:64)", NotFoundError, "no item"),
        ("fit[lr=0.1]", UsageError, r"several items of run digits-1: fit\[0\] lr=0.1 width=64, fit\[1\] lr=0.1 width"),
        ("prep[0]", NotFoundError, "prep is not fanned out"),
    ],
)
def test_an_unknown_or_ambiguous_step_name_lists_the_steps_of_the_run(typed, kind, said):
    with pytest.raises(kind, match=said):
        names(fit=MAPS).resolve(typed)


@pytest.mark.parametrize(("count", "end"), [(20, r"fit\[19\] 19$"), (500, r"fit\[19\] 19 and 480 more$")])
def test_a_long_list_is_cut_with_its_length(count, end):
    with pytest.raises(NotFoundError, match=end):
        names(fit=list(range(count))).resolve("fit[a]")


def test_items_made_at_run_time_are_known_from_their_bindings():
    step = item_step_id("fit", '{"lr":0.2}', 0)
    known = names(binding(step, "fit(1:lr:0.2)", '{"lr":0.2}'), fit="{{tasks.prep.outputs.parameters.all}}")
    assert (known.name(step), known.value(step), known.resolve("fit[lr=0.2]")) == ("fit[1]", "lr=0.2", step)
    with pytest.raises(NotFoundError, match=r"fit has: fit\[1\] lr=0.2$"):
        known.resolve("fit[0]")


def test_the_index_is_that_of_the_newest_submission():
    old, new = item_step_id("fit", "0.1", 0), item_step_id("fit", "0.2", 0)
    dynamic = "{{tasks.prep.outputs.parameters.all}}"
    known = names(binding(old, "fit(0:0.1)", "0.1"), binding(new, "fit(0:0.2)", "0.2", submission=2), fit=dynamic)
    assert known.resolve("fit[0]") == new
    assert known.name(old) == old


def test_an_item_that_argo_numbers_nowhere_is_shown_by_its_id():
    bare = item_step_id("fit", "0.2", 0)
    assert names(binding(bare, "fit", "0.2"), fit="{{tasks.prep.outputs.parameters.all}}").label(bare) == bare


def test_equal_items_have_the_index_under_which_argo_runs_them():
    first, second = ids("fit", ["x", "x"])
    known = names(binding(first, "fit(2:x)", "x"), binding(second, "fit(0:x)", "x"), fit=["x", "y", "x"])
    assert (known.name(first), known.name(second)) == ("fit[2]", "fit[0]")


def test_the_workflow_is_enough_for_the_items_that_it_lists():
    def refuse() -> list[ItemBinding]:
        raise AssertionError("bindings were read")

    known = StepNames(RUN, CompiledPipeline.from_manifest(workflow(fit=MAPS, more="[1, 2]")), refuse)
    assert known.name(ids("more", [1, 2])[1]) == "more[1]"
    assert known.label(ids("fit", MAPS)[1]) == "fit[1] lr=0.1 width=128"


def test_step_ids_in_a_text_become_names():
    first, second = ids("fit", [0.1, 0.2])
    text = (
        f"attempt 2 of {second} starts from run-1/{first}, not from {item_step_id('fit', '9', 0)} or v1.0a1b2c3d4e5f.0"
    )
    assert names(fit=[0.1, 0.2]).readable(text) == text.replace(first, "fit[0]").replace(second, "fit[1]")


def test_bindings_are_read_from_the_store_and_a_damaged_one_is_left_out(tmp_path):
    store = DirectoryStore(tmp_path)
    manifest = workflow(fit="{{tasks.prep.outputs.parameters.all}}")
    layout = RunLayout(RUN)
    for number in (1, 2):
        claim = SubmissionClaim(
            run=RUN, submission=number, kind=SubmissionKind.RESUME, workflow_name="wf", namespace="default"
        )
        store.create(layout.submission(number), claim.to_bytes())
    step, damaged = item_step_id("fit", "0.1", 0), item_step_id("fit", "0.2", 0)
    for number in (1, 2):
        bound = binding(step, f"fit({number}:0.1)", "0.1", submission=number)
        store.create(layout.item(number, step), bound.to_bytes())
    store.create(layout.item(2, damaged), b"{")
    store.create(layout.submission_binding(1), b"{}")  # a damaged record of a submission hides no name
    record = RunRecord(run=RUN, pipeline="digits", workflow=manifest, digest=json_digest(manifest))
    store.create(RunLayout(RUN).run_record, record.to_bytes())
    known = RunHistory(store, RUN).names
    assert (known.name(step), known.name(damaged)) == ("fit[1]", damaged)


MADE = "{{tasks.prep.outputs.parameters.all}}"


def test_an_item_keeps_its_index_where_a_later_submission_runs_only_the_missing_items():
    first, second, third = ids("fit", ["a", "b", "c"])
    bound = [binding(step, f"fit({index}:{step})") for index, step in enumerate((first, second, third))]
    later = [binding(second, "fit(0:b)", submission=2), binding(third, "fit(1:c)", submission=2)]
    known = names(*bound, *later, fit=MADE)
    assert [known.name(step) for step in (first, second, third)] == ["fit[0]", "fit[1]", "fit[2]"]


def test_an_item_has_its_newest_index_where_the_items_themselves_have_changed():
    first, second, third = ids("fit", ["a", "b", "c"])
    bound = [binding(first, "fit(0:a)"), binding(second, "fit(1:b)")]
    later = [binding(third, "fit(0:c)", submission=2), binding(second, "fit(1:b)", submission=2)]
    known = names(*bound, *later, fit=MADE)
    assert [known.name(step) for step in (third, second)] == ["fit[0]", "fit[1]"]
