"""A model is registered once: verified, whoever dies or races, the alias last.

| what happens | versions and alias afterwards |
|---|---|
| the step runs three times | one version; later calls return it |
| a crash at any point | the next call finishes the same version |
| two callers at once | one version; the other is deleted |
| MLflow is down | a request that the next call, or the desk, finishes |
| bytes that no record has | nothing in MLflow |
| a newer run was promoted meanwhile | the alias stays where it is |
| a program forged the request | the desk refuses it |
"""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from support.builders.irregular_samples import Irregular
from support.fakes.mlflow import ALIAS, MODEL, MODEL_NAME, REGISTER, RUN, FakeMlflow, write_run
from support.processes.failpoints import dying_at

from tiphys.errors import IntegrityError, NotFoundError, StoreError
from tiphys.lineage.run_history import RunHistory
from tiphys.records import ModelVersionRecord, RegistrationRequest, ReuseRecord
from tiphys.records.tracking import ModelRegistration
from tiphys.store import DamagedRecord, DirectoryStore, ObjectInfo, RunLayout, Store
from tiphys.tracking.records import list_registrations, registration_key
from tiphys.tracking.registration import (
    find_recorded_output,
    hash_files,
    register_model,
    repeat_registration,
    request_registration,
    source_uri,
    version_tags,
)

WANTED = ModelRegistration(model=MODEL_NAME, alias=ALIAS)
POINTS = (
    "register.after_request",
    "register.after_model",
    "register.before_version",
    "register.after_version",
    "register.before_alias",
    "register.after_set_alias",
    "register.after_alias",
)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = DirectoryStore(tmp_path / "store")
    write_run(store)
    return store


@pytest.fixture
def server() -> FakeMlflow:
    return FakeMlflow()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model"
    file.write_bytes(MODEL)
    return file


def register(server: FakeMlflow, store: Store, model: Path, run: str = RUN) -> ModelVersionRecord:
    recorded = find_recorded_output(store, run, hash_files(model))
    registration, request = request_registration(store, run, REGISTER, WANTED, recorded)
    return register_model(server, store, registration, request, recorded)


def at_the_desk(server: FakeMlflow, store: Store, run: str = RUN) -> list[ModelVersionRecord]:
    pipeline = RunHistory(store, run).pipeline
    return [repeat_registration(server, store, one, pipeline) for one in list_registrations(store, run)]


def test_a_model_is_registered_once_however_often_it_is_called(
    server: FakeMlflow, store: DirectoryStore, model: Path
) -> None:
    assert {register(server, store, model).nonce for _ in range(3)} == {register(server, store, model).nonce}
    assert list(server.versions) == [(MODEL_NAME, 1)]
    assert server.models == {MODEL_NAME: {ALIAS: 1}}


def test_step_registers_its_model_under_two_names(server: FakeMlflow, store: DirectoryStore, model: Path) -> None:
    recorded = find_recorded_output(store, RUN, hash_files(model))
    for name in (MODEL_NAME, f"{MODEL_NAME}-2"):
        registration, request = request_registration(
            store, RUN, REGISTER, ModelRegistration(model=name, alias=ALIAS), recorded
        )
        assert request.model == name
        register_model(server, store, registration, request, recorded)
    assert server.models == {MODEL_NAME: {ALIAS: 1}, f"{MODEL_NAME}-2": {ALIAS: 1}}


def test_the_version_says_where_it_comes_from(server: FakeMlflow, store: DirectoryStore, model: Path) -> None:
    register(server, store, model)
    tags = server.versions[MODEL_NAME, 1]["tags"]
    assert tags["tiphys.run"] == RUN
    assert tags["tiphys.step"] == "fit"
    assert tags["tiphys.attempt"] == "1"
    assert tags["tiphys.commit"] == "c" * 40
    assert tags["tiphys.image"] == "trainer@sha256:" + "a" * 64
    assert tags["tiphys.dataset"] == "d" * 64
    assert tags["tiphys.checkpoint"] == f"{RUN}/fit/1-30"
    assert tags["tiphys.source"].endswith("outputs/fit/000000001/artifacts/model")


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_point_is_finished_by_the_next_call(
    server: FakeMlflow, store: DirectoryStore, model: Path, point: str
) -> None:
    with dying_at(point):
        register(server, store, model)
    assert register(server, store, model).model_version == "1"
    assert list(server.versions) == [(MODEL_NAME, 1)]
    assert server.models == {MODEL_NAME: {ALIAS: 1}}


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_point_is_finished_at_the_desk(
    server: FakeMlflow, store: DirectoryStore, model: Path, point: str
) -> None:
    with dying_at(point):
        register(server, store, model)
    [pending] = list_registrations(store, RUN)
    assert pending.done is None
    assert [one.model_version for one in at_the_desk(server, store)] == ["1"]
    assert server.models == {MODEL_NAME: {ALIAS: 1}}
    [done] = list_registrations(store, RUN)
    assert done.report().model_version == "1"


def test_of_two_callers_at_once_one_version_stays(server: FakeMlflow, store: DirectoryStore, model: Path) -> None:
    create, others = server.create_version, []

    def create_beside_another(name: str, source: str, run: str, tags: dict[str, str]) -> int:
        if not others:
            others.append(None)
            others.append(register(server, store, model))
        return create(name, source, run, tags)

    server.create_version = create_beside_another  # type: ignore[method-assign]
    assert register(server, store, model) == others[1]
    assert list(server.versions) == [(MODEL_NAME, 1)]
    assert server.models == {MODEL_NAME: {ALIAS: 1}}


def test_a_server_that_is_down_leaves_a_request_for_later(
    server: FakeMlflow, store: DirectoryStore, model: Path
) -> None:
    server.down = True
    with pytest.raises(StoreError):
        register(server, store, model)
    [pending] = list_registrations(store, RUN)
    assert (pending.done, pending.report().model_version) == (None, "")
    server.down = False
    assert register(server, store, model).model_version == "1"


@pytest.mark.parametrize("content", [b"other weights", b""])
def test_bytes_that_no_step_has_recorded_are_not_registered(
    server: FakeMlflow, store: DirectoryStore, model: Path, content: bytes
) -> None:
    model.write_bytes(content)
    with pytest.raises(IntegrityError, match="no finished step has recorded"):
        register(server, store, model)
    assert (server.models, list_registrations(store, RUN)) == ({}, [])


def test_an_empty_folder_is_no_model(store: DirectoryStore, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(IntegrityError, match="no finished step has recorded"):
        find_recorded_output(store, RUN, hash_files(tmp_path / "nothing"))


def test_bytes_that_storage_has_damaged_since_are_not_registered_at_the_desk(
    server: FakeMlflow, store: DirectoryStore, model: Path, tmp_path: Path
) -> None:
    with dying_at("register.after_request"):
        register(server, store, model)
    stored = tmp_path / "store" / RunLayout(RUN).outputs("fit", 1) / "artifacts" / "model"
    stored.chmod(0o644)
    stored.write_bytes(MODEL[::-1])
    with pytest.raises(IntegrityError, match="do not match their record"):
        at_the_desk(server, store)
    assert server.versions == {}


def test_an_output_that_is_gone_from_storage_is_not_registered(
    server: FakeMlflow, store: DirectoryStore, model: Path
) -> None:
    store.delete(f"{RunLayout(RUN).outputs('fit', 1)}artifacts/model")
    with pytest.raises(IntegrityError, match="is missing"):
        register(server, store, model)
    assert (server.versions, server.models) == ({}, {})


def test_the_alias_stays_at_a_model_that_was_promoted_meanwhile(
    server: FakeMlflow, store: DirectoryStore, model: Path
) -> None:
    with dying_at("register.before_alias"):
        register(server, store, model)
    write_run(store, "digits-2", b"newer weights")
    newer = model.with_name("newer")
    newer.write_bytes(b"newer weights")
    assert register(server, store, newer, "digits-2").model_version == "2"
    assert register(server, store, model).model_version == "1"
    assert server.models == {MODEL_NAME: {ALIAS: 2}}


def test_a_person_may_move_the_alias_back(server: FakeMlflow, store: DirectoryStore, model: Path) -> None:
    register(server, store, model)
    write_run(store, "digits-2", b"newer weights")
    newer = model.with_name("newer")
    newer.write_bytes(b"newer weights")
    register(server, store, newer, "digits-2")
    server.set_alias(MODEL_NAME, ALIAS, 1)
    register(server, store, newer, "digits-2")
    assert server.models == {MODEL_NAME: {ALIAS: 1}}


def test_a_version_that_a_person_deleted_is_not_made_again(
    server: FakeMlflow, store: DirectoryStore, model: Path
) -> None:
    register(server, store, model)
    server.delete_version(MODEL_NAME, 1)
    with pytest.raises(NotFoundError, match="was deleted in MLflow"):
        register(server, store, model)
    assert server.versions == {}


def test_a_result_that_a_fork_took_over_is_the_same_version(
    server: FakeMlflow, store: DirectoryStore, model: Path
) -> None:
    register(server, store, model)
    write_run(store, "digits-2", b"its own", parent=RUN)
    reused = ReuseRecord(
        run="digits-2", submission=1, step="fit", step_key="k" * 64, source_run=RUN, source_step="fit", source_attempt=1
    )
    store.create(RunLayout("digits-2").reused(1, "fit"), reused.to_bytes())
    assert register(server, store, model, "digits-2").model_version == "1"
    assert list(server.versions) == [(MODEL_NAME, 1)]


def test_version_names_the_run_that_made_the_model_and_the_run_that_registered_it(
    server: FakeMlflow, store: DirectoryStore, model: Path
) -> None:
    maker, other = Irregular().run_names(2)
    write_run(store, maker, b"weights of another model")
    model.write_bytes(b"weights of another model")
    write_run(store, other, b"its own", parent=maker)
    reused = ReuseRecord(
        run=other, submission=1, step="fit", step_key="k" * 64, source_run=maker, source_step="fit", source_attempt=1
    )
    store.create(RunLayout(other).reused(1, "fit"), reused.to_bytes())
    register(server, store, model, other)
    [made] = server.versions.values()
    tags = made["tags"]
    assert (tags["tiphys.run"], tags["tiphys.registered_by"]) == (maker, other)
    assert tags["tiphys.sha256"] == hash_files(model)[""]


def test_folder_of_equal_sized_files_has_a_hash_of_all_of_them(store: DirectoryStore) -> None:
    recorded = find_recorded_output(store, RUN, {"": _sha256_of_model(store)})
    [file] = recorded.output.objects
    hashes = [sha256(content).hexdigest() for content in Irregular().equal_sized_bytes(3)]

    def tag_of(*digests: str) -> str:
        objects = tuple(
            file.model_copy(update={"key": f"{file.key}/{number}", "sha256": digest})
            for number, digest in enumerate(digests)
        )
        folder = recorded.output.model_copy(update={"directory": True, "objects": objects})
        return version_tags(store, recorded._replace(output=folder))["tiphys.sha256"]

    first, second, third = hashes
    tags = {tag_of(first, second), tag_of(first, third), tag_of(third, second), tag_of(second, first)}
    assert len(tags) == 4
    assert not tags & set(hashes)


def forge(store: Store, **changes: str | int) -> None:
    """A program of the run writes a request of its own."""
    fields: dict = {
        "run": RUN,
        "step": REGISTER,
        "model": MODEL_NAME,
        "alias": ALIAS,
        "version_key": "0" * 32,
        "source_run": RUN,
        "source_step": "fit",
        "source_attempt": 1,
        "output": "model",
    }
    request = RegistrationRequest(**{**fields, **changes})
    store.create(registration_key(RUN, REGISTER, "1" * 32), request.to_bytes())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "fraud-detection"}, "not what its Workflow registers"),
        ({"alias": "production"}, "not what its Workflow registers"),
        ({"source_run": "digits-2"}, "neither made nor reused"),
        ({"output": "../../model"}, "neither made nor reused"),
        ({}, "names the version of another output"),
    ],
)
def test_the_desk_does_not_do_what_a_program_made_up(
    server: FakeMlflow, store: DirectoryStore, changes: dict, reason: str
) -> None:
    write_run(store, "digits-2")
    forge(store, **changes)
    with pytest.raises(IntegrityError, match=reason):
        at_the_desk(server, store)
    assert server.versions == {}


@pytest.mark.parametrize("model", ["x' or name != '", "a\nb", "<b>", "x" * 300])
def test_a_name_that_would_change_a_search_is_no_request(model: str) -> None:
    with pytest.raises(ValidationError):
        ModelRegistration(model=model)


@pytest.mark.parametrize("changes", [{"run": "digits-2"}, {"step": "fit"}, {"step": "<b>../x</b>"}])
def test_a_request_below_another_step_or_run_is_damage(store: DirectoryStore, changes: dict) -> None:
    forge(store, **changes)
    with pytest.raises(IntegrityError, match="copied from another key"):
        list_registrations(store, RUN)
    damaged: list[DamagedRecord] = []
    assert list_registrations(store, RUN, damaged) == []
    assert len(damaged) == 1


def test_a_folder_is_compared_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "m" / "deep").mkdir(parents=True)
    (tmp_path / "m" / "a").write_bytes(b"1")
    (tmp_path / "m" / "deep" / "b").write_bytes(b"2")
    before = hash_files(tmp_path / "m")
    assert set(before) == {"a", "deep/b"}
    (tmp_path / "m" / "deep" / "b").write_bytes(b"3")
    assert hash_files(tmp_path / "m") != before


def test_the_source_is_no_path_of_this_machine(store: DirectoryStore) -> None:
    recorded = find_recorded_output(store, RUN, {"": _sha256_of_model(store)})
    assert source_uri(store, recorded) == f"tiphys://{RUN}/fit/1/model"
    assert all(len(value) < 5000 for value in version_tags(store, recorded).values())


@pytest.mark.parametrize(
    ("url", "source"),
    [
        ("s3://ml-runs/tiphys", "s3://ml-runs/tiphys/KEY"),
        ("gs://ml-runs/tiphys", "gs://ml-runs/tiphys/KEY"),
        ("az://account/runs/ml/tiphys", "wasbs://runs@account.blob.core.windows.net/ml/tiphys/KEY"),
        ("az://account/runs", "wasbs://runs@account.blob.core.windows.net/KEY"),
    ],
)
def test_the_source_is_an_address_that_mlflow_can_load(store: DirectoryStore, url: str, source: str) -> None:
    recorded = find_recorded_output(store, RUN, {"": _sha256_of_model(store)})
    elsewhere = SimpleNamespace(url=url)
    assert source_uri(elsewhere, recorded) == source.replace("KEY", recorded.output.key)  # type: ignore[arg-type]


def test_foreign_keys_beside_registrations_are_listed_within_a_bound(store: DirectoryStore) -> None:
    stem = registration_key(RUN, "register", "0").rpartition("/")[0]
    for number in range(50):
        store.create(f"{stem}/{number:04}.done.json", b"{}")
    listed: list[str] = []
    original = store.list

    def count(prefix: str, *arguments: object) -> Iterator[ObjectInfo]:
        for info in original(prefix, *arguments):  # type: ignore[arg-type]
            listed.append(info.key)
            yield info

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "list", count)
        patch.setattr("tiphys.tracking.records.MAX_REGISTRATIONS", 3)
        assert list_registrations(store, RUN) == []
    assert len(set(listed)) == 12


def _sha256_of_model(store: Store) -> str:
    return sha256(store.read(f"{RunLayout(RUN).outputs('fit', 1)}artifacts/model")).hexdigest()
