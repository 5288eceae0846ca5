"""The share of its batch that a program is advised to take."""

import pytest
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, write_claim

from tiphys import checkpoint
from tiphys.errors import StoreError, UsageError
from tiphys.records import Escalation
from tiphys.store import DirectoryStore


def test_the_whole_batch_is_advised_unless_set_otherwise():
    assert checkpoint.batch_scale({}) == checkpoint.batch_scale({"TIPHYS_BATCH_SCALE": ""}) == 1.0
    assert checkpoint.batch_scale({"TIPHYS_BATCH_SCALE": "0.25"}) == 0.25


@pytest.mark.parametrize("text", ["half", "0", "-1", "2", "nan"])
def test_an_invalid_batch_share_is_refused(text):
    with pytest.raises(UsageError, match=r"TIPHYS_BATCH_SCALE=.* is not valid"):
        checkpoint.batch_scale({"TIPHYS_BATCH_SCALE": text})


def environ(store, attempt):
    own = {"STORE": store, "RUN": RUN, "STEP": STEP, "LINEAGE": LINEAGE, "ATTEMPT": str(attempt)}
    return {f"TIPHYS_{name}": value for name, value in own.items()}


def test_a_pod_that_no_variable_reaches_finds_it_in_the_claim_of_its_attempt(tmp_path):
    store = DirectoryStore(tmp_path / "store")
    given = (None, Escalation(batch_scale=0.5), Escalation(memory_bytes=1))
    for number, escalation in enumerate(given, start=1):
        write_claim(store, claim_of(number).model_copy(update={"escalation": escalation}))
    assert [checkpoint.batch_scale(environ(store.url, number)) for number in (1, 2, 3, 4)] == [1.0, 0.5, 1.0, 1.0]


def test_storage_out_of_reach_asks_to_be_tried_again(monkeypatch):
    def unreachable(*_, **__):
        raise StoreError("s3://ml-runs is out of reach")

    monkeypatch.setattr("tiphys.checkpoint.lifecycle.out_of_memory.open_store", unreachable)
    with pytest.raises(SystemExit) as ended:
        checkpoint.batch_scale(environ("s3://ml-runs/tiphys", 2))
    assert ended.value.code == 69
