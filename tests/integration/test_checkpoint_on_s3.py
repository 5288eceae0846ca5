"""The session over a real S3 server: the same promises, with a network in between."""

import pytest
from support.builders.lineage import LINEAGE, RUN, attempts_of, ref
from support.servers import s3_proxy as faults
from support.servers.s3_proxy import Times
from support.stories.sessions import admitted, open_session, state_at, train

from tiphys import checkpoint
from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.select import choose_checkpoint, list_commits
from tiphys.store import LineageLayout, S3Store

LAYOUT = LineageLayout(LINEAGE)


@pytest.fixture
def proxy(bucket, s3_endpoint, monkeypatch):
    with faults.s3_proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        yield proxy


@pytest.fixture
def store(bucket, proxy):
    return S3Store(bucket, "team/tiphys", sleep=lambda seconds: None)


def test_a_program_finds_its_checkpoints_by_the_environment_alone(bucket, proxy):
    environ = {
        "TIPHYS_STORE": f"s3://{bucket}/team/tiphys",
        "TIPHYS_RUN": RUN,
        "TIPHYS_STEP": "fit",
        "TIPHYS_ATTEMPT": "1",
        "TIPHYS_LINEAGE": LINEAGE,
        "TIPHYS_SAVE_EVERY": "2 steps",
    }
    admitted(S3Store(bucket, "team/tiphys"), 1)
    with checkpoint.session(environ=environ) as session:
        session.restore(default=state_at(0))
        session.step(2, state_at(2))
    admitted(S3Store(bucket, "team/tiphys"), 2, ref(1, 2))
    with checkpoint.session(environ={**environ, "TIPHYS_ATTEMPT": "2", "TIPHYS_RESUME_FROM": "1-2"}) as session:
        assert session.restore(default=state_at(0))["step"] == 2


def test_retention_leaves_what_it_should(store):
    train(store, 5, keep_last=2)
    assert list_commits(store, LINEAGE) == [ref(1, 5), ref(1, 4)]
    assert {LAYOUT.parse_shard(info.key) for info in store.list(LAYOUT.all_shards)} == {ref(1, 5), ref(1, 4)}


def test_every_reply_lost_once_is_still_one_commit(store, proxy):
    """The client repeats a write that was applied, meets its own object, and knows it."""
    proxy.behaviour = Times(3, faults.is_write, faults.loses_reply)
    session = open_session(store)
    assert session.save(1, state_at(1)).wait() == ref(1, 1)
    assert session.failed_saves == 0
    assert open_session(store, 2, resume_from=ref(1, 1)).restore()["step"] == 1


def test_storage_that_refuses_writes_costs_checkpoints_and_not_the_training(store, proxy):
    session = open_session(store)
    assert session.save(1, state_at(1)).wait() == ref(1, 1)
    proxy.behaviour = Times(100, faults.is_write, faults.refuses(403, "AccessDenied"))
    assert session.save(2, state_at(2)).wait() is None
    assert session.failed_saves == 1
    proxy.behaviour = faults.honest
    assert session.save(3, state_at(3)).wait() == ref(1, 3)


def test_choosing_costs_four_requests_however_many_checkpoints_there_are(store, proxy):
    train(store, 12)
    proxy.requests.clear()
    assert choose_checkpoint(store, LINEAGE, attempts_of(None)).checkpoint == ref(1, 12)
    assert len(proxy.requests) == 4
    assert list_quarantined(store, LINEAGE) == set()
