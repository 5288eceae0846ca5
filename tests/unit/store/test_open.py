"""From the URL a person writes to the store it means."""

from pathlib import Path

import pytest

import tiphys.store
from tiphys.errors import NotFoundError, UsageError
from tiphys.store import DirectoryStore, S3Store, artifact_prefix, is_bucket_url, open_store


@pytest.mark.parametrize("spelling", ["{}", "file://{}"])
def test_a_path_and_a_file_url_open_the_same_folder(tmp_path: Path, spelling: str) -> None:
    DirectoryStore(tmp_path).create("a", b"1")

    store = open_store(spelling.format(tmp_path), must_exist=True)

    assert store.read("a") == b"1"
    assert store.url == f"file://{tmp_path}"


@pytest.mark.parametrize("spelling", ["store", "./store", "./a:b/store", "with space"])
def test_a_relative_path_is_made_below_the_present_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    monkeypatch.chdir(tmp_path)

    open_store(spelling).create("a", b"")

    assert (tmp_path / spelling / "a").exists()


@pytest.mark.parametrize("name", ["plain", "with space", "käse", "50%", "a#b", "a?b"])
def test_the_url_of_a_folder_opens_it_again(tmp_path: Path, name: str) -> None:
    DirectoryStore(tmp_path / name).create("a", b"1")

    again = open_store(DirectoryStore(tmp_path / name).url, must_exist=True)

    assert again.read("a") == b"1"


def test_a_folder_that_must_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        open_store(f"{tmp_path}/absent", must_exist=True)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("s3://ml-runs", "s3://ml-runs"),
        ("s3://ml-runs/", "s3://ml-runs"),
        ("s3://ml-runs/team/tiphys", "s3://ml-runs/team/tiphys"),
        ("s3://ml-runs/team/tiphys/", "s3://ml-runs/team/tiphys"),
        ("S3://ml-runs/a b", "s3://ml-runs/a b"),
    ],
)
def test_an_s3_url_names_bucket_and_prefix(url: str, same: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiphys.store.open.check_format", lambda store: None)  # there is no server
    store = open_store(url)

    assert isinstance(store, S3Store)
    assert store.url == same


@pytest.mark.parametrize(
    ("url", "prefix"),
    [
        ("s3://ml-runs", ""),
        ("S3://ml-runs/team/tiphys/", "team/tiphys/"),
        ("gs://ml-runs/a b", "a b/"),
        ("az://mlruns/runs", ""),
        ("az://mlruns/runs/team/tiphys", "team/tiphys/"),
    ],
)
def test_the_artifact_prefix_at_compile_is_that_of_the_store(
    url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiphys.store.open.check_format", lambda store: None)  # there is no server
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")  # nor an account
    assert artifact_prefix(url) == prefix
    assert open_store(url).artifact_key("data/x") == f"{prefix}data/x"


@pytest.mark.parametrize("url", ["", "/var/runs", "file:///var/runs", "http://minio:9000/ml", "a:b"])
def test_keys_of_a_folder_or_of_no_store_have_no_prefix(url: str) -> None:
    assert artifact_prefix(url) == ""


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (
            "",
            "URL is empty; use s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix, file:///absolute",
        ),
        ("gs://m!l/tiphys", "no bucket can have the name 'm!l'; use gs://bucket/prefix"),
        ("gs://", "names no bucket"),
        ("gs:///prefix", "names no bucket"),
        ("gs://ml-runs/p?generation=1", "names no bucket and prefix"),
        ("gs://ml-runs/a//b", "must not be empty"),
        ("az://mlruns", "names an account without a container"),
        ("az://mlruns/", "names an account without a container"),
        ("az:///runs", "names no bucket"),
        ("az://ml-runs/runs", "no account can have the name 'ml-runs'; use az://account/container/prefix"),
        ("az://mlruns/Runs/p", "no container can have the name 'Runs'"),
        ("az://mlruns/a--b/p", "no container can have the name 'a--b'"),
        ("abfs://runs@mlruns/p", "no store has the scheme abfs://; use s3://"),
        ("http://minio:9000/ml", "no store has the scheme http://"),
        ("s3:/ml/tiphys", "names no bucket and prefix"),
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3://ml-runs/p?versionId=1", "names no bucket and prefix"),
        ("s3://ml-runs/p#x", "names no bucket and prefix"),
        ("s3://ml-runs/a//b", "must not be empty"),
        ("s3://ml-runs/../b", "must not be"),
        ("s3://m!l", "no bucket can have the name 'm!l'"),
        ("s3://ml-runs:9000/p", "no bucket can have the name"),
        ("s3://ml--use1-az4--x-s3/p", "directory bucket .* listings are not ordered"),
        ("file://ml/tiphys", "names no absolute folder: three slashes"),
        ("file:tiphys", "names no absolute folder"),
        ("file:///tiphys?x", "names no absolute folder"),
    ],
)
def test_an_invalid_url_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://ml-runs/tiphys", True),
        ("S3://ml-runs/{namespace}", True),
        ("gs://ml-runs", True),
        ("az://mlruns/runs", True),
        ("s3://[", True),
        ("file:///ml", False),
        ("s3/ml", False),
        ("./s3:/ml", False),
        ("http://s3", False),
        ("", False),
    ],
)
def test_a_url_says_by_its_scheme_whether_the_store_is_a_bucket(url: str, expected: bool) -> None:
    assert is_bucket_url(url) is expected


@pytest.mark.parametrize(
    "url", ["s3://AKIAXXX:hunter2@ml/tiphys", "gs://me:hunter2@ml/tiphys", "az://ml:hunter2@ml/runs/tiphys"]
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError, match="credentials do not belong") as caught:
        open_store(url)

    assert "hunter2" not in str(caught.value)


def test_the_package_offers_exactly_what_it_says() -> None:
    assert sorted(tiphys.store.__all__) == tiphys.store.__all__
    assert all(hasattr(tiphys.store, name) for name in tiphys.store.__all__)
    assert {"open_store", "DirectoryStore", "S3Store", "claim_record", "list_runs", "RunLayout"} <= set(
        tiphys.store.__all__
    )
