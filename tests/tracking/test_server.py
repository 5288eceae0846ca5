"""`MlflowServer` against a real MLflow 3, and `FakeMlflow` of the unit tests against it: the same suite over both.

Each test has names of its own, because they share a server.
"""

import secrets

import pytest
from support.fakes.mlflow import FakeMlflow

from tiphys.errors import ConflictError, NotFoundError, TiphysError
from tiphys.tracking.server import MlflowServer, connect

SOURCE = "s3://ml-runs/tiphys/data/runs/digits-1/outputs/fit/000000001/artifacts/model"


@pytest.fixture(params=["fake", "real"])
def server(request: pytest.FixtureRequest) -> MlflowServer:
    if request.param == "fake":
        return FakeMlflow()
    return connect({"MLFLOW_TRACKING_URI": request.getfixturevalue("tracking_uri")})


@pytest.fixture
def name() -> str:
    return f"name-{secrets.token_hex(6)}"


def test_an_experiment_is_created_once(server: MlflowServer, name: str) -> None:
    assert server.experiment(name) == server.experiment(name)
    assert server.experiment(f"{name}-2") != server.experiment(name)


def test_runs_are_found_by_a_tag_until_they_are_deleted(server: MlflowServer, name: str) -> None:
    experiment = server.experiment(name)
    first = server.create_run(experiment, "fit", {"tiphys.id": "a" * 32})
    second = server.create_run(experiment, "fit", {"tiphys.id": "a" * 32})
    server.create_run(experiment, "fit", {"tiphys.id": "b" * 32})
    assert [run.id for run in server.find_runs(experiment, "tiphys.id", "a" * 32)] == [first, second]
    assert server.run_exists(first)
    server.delete_run(first)
    server.delete_run(first)
    assert not server.run_exists(first)
    assert [run.id for run in server.find_runs(experiment, "tiphys.id", "a" * 32)] == [second]


def test_a_run_that_is_nowhere_is_no_error_to_delete(server: MlflowServer) -> None:
    server.delete_run("f" * 32)
    assert not server.run_exists("f" * 32)


def test_a_status_can_be_set_again_and_again(server: MlflowServer, name: str) -> None:
    experiment = server.experiment(name)
    run = server.create_run(experiment, "fit", {"tiphys.id": "a" * 32})
    for status in ("RUNNING", "FAILED", "RUNNING", "KILLED", "RUNNING", "FINISHED"):
        server.set_status(run, status)  # type: ignore[arg-type]
        assert [one.status for one in server.find_runs(experiment, "tiphys.id", "a" * 32)] == [status]
    with pytest.raises(NotFoundError):
        server.set_status("f" * 32, "RUNNING")


def test_versions_are_found_by_a_tag_in_ascending_order(server: MlflowServer, name: str) -> None:
    server.ensure_model(name)
    server.ensure_model(name)
    assert server.find_versions(name, "tiphys.registration", "a" * 32) == []
    numbers = [server.create_version(name, SOURCE, "", {"tiphys.registration": "a" * 32}) for _ in range(3)]
    assert server.find_versions(name, "tiphys.registration", "a" * 32) == numbers == sorted(numbers)
    server.delete_version(name, numbers[0])
    server.delete_version(name, numbers[0])
    assert [server.version_exists(name, number) for number in numbers] == [False, True, True]
    server.tag_version(name, numbers[2], "tiphys.alias.champion", "wanted")
    assert server.find_versions(name, "tiphys.alias.champion", "wanted") == [numbers[2]]


def test_a_source_without_a_path_of_a_machine_is_accepted(server: MlflowServer, name: str) -> None:
    server.ensure_model(name)
    assert server.create_version(name, "tiphys://digits-1/fit/1/model", "", {}) == 1


def test_an_alias_names_one_version_and_moves(server: MlflowServer, name: str) -> None:
    server.ensure_model(name)
    first, second = (server.create_version(name, SOURCE, "", {}) for _ in range(2))
    assert server.alias(name, "champion") is None
    server.set_alias(name, "champion", second)
    assert server.alias(name, "champion") == second
    server.set_alias(name, "champion", first)
    assert server.alias(name, "champion") == first
    with pytest.raises(TiphysError):
        server.set_alias(name, "champion", 99)


@pytest.mark.parametrize("collisions", [1, 2])
def test_a_row_that_another_caller_wrote_at_the_same_moment_is_written_again(
    tracking_uri: str, name: str, monkeypatch: pytest.MonkeyPatch, collisions: int
) -> None:
    exceptions = pytest.importorskip("mlflow.exceptions")
    found = connect({"MLFLOW_TRACKING_URI": tracking_uri})
    found.ensure_model(name)
    version = found.create_version(name, SOURCE, "", {})
    write, left = found._client.set_registered_model_alias, [None] * collisions

    def collide(*given: str) -> None:
        if left:
            left.pop()
            text = "(sqlite3.IntegrityError) UNIQUE constraint failed: registered_model_aliases.alias"
            raise exceptions.MlflowException(text, error_code=exceptions.BAD_REQUEST)
        write(*given)

    monkeypatch.setattr(found._client, "set_registered_model_alias", collide)
    if collisions == 1:
        found.set_alias(name, "champion", version)
        assert found.alias(name, "champion") == version
    else:
        with pytest.raises(ConflictError, match="IntegrityError"):
            found.set_alias(name, "champion", version)
