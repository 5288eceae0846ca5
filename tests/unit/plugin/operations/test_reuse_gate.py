"""The gate at the start of a Workflow that is submitted as it is: which steps it takes over, and what it answers.

| the step | answer |
|---|---|
| its result is shared, intact, of the same program and inputs | true, with its outputs |
| not shared, of other inputs, damaged, behind one that runs | false, and empty outputs: Argo needs each that is named |
| asked again | the same, also where the result is gone from the memo since |
| storage is slow | false for the steps that were not looked up in ten seconds |
| refused, or nobody answers for long | false for all |
"""

import hashlib

import pytest
from support.stories.plugin import Flow, World, artifacts, outputs, phase, said
from tiphys_plugin.operations import reuse_gate
from tiphys_plugin.sidecar.outages import OutageClock

from tiphys.protocol.step_spec import StepKind, StepSpec
from tiphys.recording.derived_records import write_derived_records
from tiphys.recording.step_key import StepInputs, compute_step_key
from tiphys.records import AttemptEnd, AttemptEndOutcome, Output, OutputKind, OutputObject
from tiphys.store import RunLayout, claim_record
from tiphys.store.layout import MEMOS

GATE = "digits-abc12.tiphys-reuse"


def bare(name: str = "prep", **changes) -> StepSpec:
    """A `Step` without a gate that shares its result: a number and a file."""
    given = {"parameters": ("rows",), "artifacts": ("data",), "share": True, **changes}
    return StepSpec(name=name, kind=StepKind.STEP, template=f"t-{name}", **given)


def share(here: World, spec: StepSpec, value: str = "7", run: str = "other") -> str:
    """The result of a step that another run shares; the key of its file."""
    data = f"of {spec.name}".encode()
    key = f"data/runs/{run}/outputs/{spec.name}/000000001/artifacts/data"
    written = OutputObject(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest(), version="")
    here.store.create(key, data)
    info = next(here.store.list(key))
    end = AttemptEnd(
        run=run,
        step=spec.name,
        attempt=1,
        submission=1,
        outcome=AttemptEndOutcome.DONE,
        step_key=compute_step_key(here.store, spec, StepInputs({}, [], "")).key,
        outputs=(
            Output(name="rows", kind=OutputKind.PARAMETER, key=f"{key}.rows", value=value),
            Output(
                name="data",
                kind=OutputKind.ARTIFACT,
                key=key,
                objects=(written.model_copy(update={"version": info.version}),),
            ),
        ),
    )
    claim_record(here.store, RunLayout(run).attempt_end(spec.name, 1), end)
    write_derived_records(here.store, spec, end)
    return key


def ask(flow: Flow, *steps: str, declared: bool = True):
    """The answer to the gate of these steps."""
    document = flow.document({"op": "reuse", "node": GATE, "steps": list(steps)})
    names = [name for step in steps for name in (step, f"{step}__rows")]
    document["template"]["outputs"] = {
        "parameters": [{"name": name} for name in names],
        "artifacts": [{"name": f"{step}__data"} for step in steps],
    }
    return flow.world.core.execute_document(document)


def test_a_shared_result_is_taken_over_with_its_outputs(here):
    key = share(here, bare(), "7 ü")
    flow = here.submit(bare())
    answer = ask(flow, "prep")
    assert said(answer) == "prep is adopted from run other, step prep, attempt 1"
    assert outputs(answer) == {"prep": "true", "prep__rows": "7 ü"}
    assert artifacts(answer) == {"prep__data": here.store.artifact_key(key)}
    assert [info.key for info in here.store.list(RunLayout("digits-abc12").all_reused)] == [
        RunLayout("digits-abc12").reused(1, "prep")
    ]


def test_a_repeated_call_gets_the_same_answer_although_the_result_is_no_longer_shared(here):
    share(here, bare())
    flow = here.submit(bare())
    first = ask(flow, "prep")
    for info in list(here.store.list(MEMOS)):
        here.store.delete(info.key)
    here.restart()
    assert ask(flow, "prep") == first


def test_a_step_that_runs_has_all_its_outputs_in_the_answer_as_empty_texts(here):
    share(here, bare())
    flow = here.submit(bare(), bare("other"), bare("private", share=False))
    answer = ask(flow, "prep", "other", "private")
    assert outputs(answer) == {
        "prep": "true",
        "prep__rows": "7",
        "other": "false",
        "other__rows": "",
        "private": "false",
        "private__rows": "",
    }
    assert said(ask(here.submit(bare("other"), name="second", uid="uid-2"), "other")) == (
        "Nothing is taken over: no other run shares a result of the same program and inputs"
    )


def test_a_damaged_result_is_named_and_the_step_runs(here):
    key = share(here, bare())
    here.store.delete(key)
    answer = ask(here.submit(bare()), "prep")
    assert outputs(answer)["prep"] == "false"
    assert "prep runs, because the shared result of run other is damaged: " in said(answer)


def test_the_message_names_ten_steps_and_counts_the_others(here):
    specs = [bare(f"prep-{number}") for number in range(12)]
    for spec in specs:
        share(here, spec)
    answer = ask(here.submit(*specs), *(spec.name for spec in specs))
    assert said(answer).count("is adopted from run other") == 10
    assert said(answer).endswith("; and 2 more, see `tiphys get digits-abc12`")
    assert all(value == "true" for name, value in outputs(answer).items() if "__" not in name)


def test_a_name_that_comes_twice_is_looked_up_once(here):
    share(here, bare())
    answer = ask(here.submit(bare()), "prep", "prep")
    assert said(answer) == "prep is adopted from run other, step prep, attempt 1"


def test_steps_that_storage_is_too_slow_for_run(here, monkeypatch):
    share(here, bare())
    share(here, bare("late"))
    flow = here.submit(bare(), bare("late"))
    moments = iter([0.0, 1.0, 11.0])
    monkeypatch.setattr(reuse_gate.time, "monotonic", lambda: next(moments))
    answer = ask(flow, "prep", "late")
    assert (outputs(answer)["prep"], outputs(answer)["late"]) == ("true", "false")
    assert "late runs, because storage took more than 10 s" in said(answer)


@pytest.mark.parametrize("steps", [("unknown",), ("prep", "x" * 64), ("prep",) * 2_001])
def test_a_gate_that_is_refused_takes_nothing_over(here, steps):
    share(here, bare())
    answer = ask(here.submit(bare()), *steps)
    assert phase(answer) == "Succeeded"
    assert said(answer).startswith("Nothing is taken over: Refused: ")
    assert len(said(answer)) < 400
    assert outputs(answer) == {name: "false" if "__" not in name else "" for name in outputs(answer)}


def test_an_unanswered_gate_takes_nothing_over_in_the_end(here):
    flow = here.submit(bare())
    document = flow.document({"op": "reuse", "node": GATE, "steps": ["prep"]})
    document["template"]["outputs"] = {"parameters": [{"name": "prep"}, {"name": "prep__rows"}]}
    clock = OutageClock(60.0, iter([0.0, 61.0]).__next__)
    assert clock.answer(document, "away")["node"]["phase"] == "Pending"
    final = clock.answer(document, "away")["node"]
    assert (final["phase"], final["message"]) == ("Succeeded", "Nothing is taken over: no answer for 1 min: away")
    assert final["outputs"]["parameters"] == [
        {"name": "prep", "value": "false"},
        {"name": "prep__rows", "value": ""},
    ]
