"""What is read from files of DVC, and what is refused. The files in ``dvc_3_67`` were written by DVC 3.67.1.

| situation                                          | result                              |
|----------------------------------------------------|-------------------------------------|
| output of a stage, of a foreach stage, a folder    | its hash, size and number of files  |
| ``.dvc`` file                                      | its only output                     |
| no such file, output, hash                         | says what to type                   |
| another schema, damage, a key twice, a huge file   | refused, with file and line         |
| the same path in two stages                        | refused, with both                  |
"""

import os
from pathlib import Path

import pytest

from hera_pipelines import Dvc
from hera_pipelines.authoring.data_versions import dvc, read_data_version
from tiphys.errors import NotFoundError, TiphysError, UsageError
from tiphys.records import DataVersion

RECORDED = Path(__file__).parent / "dvc_3_67"
MD5 = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "dvc.lock"


def refusal(source: Dvc, kind: type[TiphysError] = UsageError) -> str:
    with pytest.raises(kind) as caught:
        read_data_version(source)
    return str(caught.value)


def locked(outs: str, schema: str = "schema: '2.0'\n") -> str:
    return f"{schema}stages:\n  prepare:\n    cmd: python prepare.py\n    outs:\n{outs}"


@pytest.mark.parametrize(
    ("path", "version"),
    [
        (
            "data/train",
            DataVersion(
                name="data/train",
                algorithm="md5",
                digest="c37f8bc8917fdf64a45bb6010380cdab.dir",
                size_bytes=4,
                files=2,
            ),
        ),
        (
            "data/labels.csv",
            DataVersion(
                name="data/labels.csv", algorithm="md5", digest="c9dea323bc24b952f3e602a8ec0768d0", size_bytes=4
            ),
        ),
        (
            "data/b.txt",
            DataVersion(name="data/b.txt", algorithm="md5", digest="3b5d5c3712955042212316173ccf37be", size_bytes=2),
        ),
    ],
)
def test_an_output_of_a_stage_is_read_from_a_lock_that_dvc_wrote(path: str, version: DataVersion) -> None:
    assert read_data_version(Dvc(path, lock=RECORDED / "dvc.lock")) == version


def test_a_path_may_be_written_as_the_shell_completes_it() -> None:
    tidy, completed = (read_data_version(Dvc(path, RECORDED / "dvc.lock")) for path in ("data/train", "./data/train/"))
    assert completed == tidy


def test_data_that_was_added_by_hand_is_read_from_its_own_file(lock: Path) -> None:
    (lock.parent / "data").mkdir()
    (lock.parent / "data" / "raw.dvc").write_bytes((RECORDED / "raw.dvc").read_bytes())

    version = read_data_version(Dvc("data/raw.dvc"))

    assert (version.name, str(version)) == ("data/raw", "md5 c37f8bc8917fdf64a45bb6010380cdab.dir")
    assert (version.size_bytes, version.files) == (4, 2)


def test_a_lock_is_looked_for_where_the_command_runs(lock: Path) -> None:
    assert f"dvc.lock does not exist in {lock.parent}; `dvc repro` writes it" in refusal(Dvc("data"), NotFoundError)
    assert "raw.dvc does not exist" in refusal(Dvc("raw.dvc"), NotFoundError)
    lock.write_bytes((RECORDED / "dvc.lock").read_bytes())
    assert read_data_version(Dvc("data/train")).files == 2


def test_an_unknown_output_is_refused_with_a_similar_one() -> None:
    message = refusal(Dvc("data/trian", RECORDED / "dvc.lock"), NotFoundError)
    assert "dvc.lock has no output 'data/trian'; did you mean 'data/train'?" in message


def test_an_input_of_a_stage_leads_to_the_file_that_tracks_it() -> None:
    message = refusal(Dvc("raw", RECORDED / "dvc.lock"), NotFoundError)
    assert "'raw' is no output there, only an input" in message
    assert "Dvc('raw.dvc')" in message


@pytest.mark.parametrize("path", ["", "../data", "data/../../x", "/data/train", ".", "a\nb", "{{x}}", "d" * 1025])
def test_a_path_outside_or_none_at_all_is_refused_before_anything_is_read(path: str) -> None:
    with pytest.raises(UsageError, match="Dvc"):
        Dvc(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (locked(f"    - path: data\n      md5: {MD5}\n", ""), "its schema is missing, and 2.0 is supported"),
        (locked(f"    - path: data\n      md5: {MD5}\n", "schema: '3.0'\n"), "its schema is '3.0'"),
        ("schema: '2.0'\nstages: [prepare]\n", "its stages are no mapping"),
        ("schema: '2.0'\nstages: {prepare: 3}\n", "stage 'prepare' is no mapping"),
        (locked("    - md5: x\n"), "stage 'prepare' has outputs without a path"),
        (locked("      data\n"), "stage 'prepare' has outputs without a path"),
        (locked("    - path: data\n"), "'data' has no hash there"),
        (locked("    - path: data\n      etag: '{{x}}'\n"), "the 'etag' of 'data' is '{{x}}'"),
        (locked("    - path: data\n      hash: '{{x}}'\n      '{{x}}': a\n"), "the hash of 'data' is called '{{x}}'"),
        (locked(f"    - path: data\n      hash: {'x' * 33}\n      {'x' * 33}: a\n"), "the hash of 'data' is called"),
        (locked("    - path: data\n      hash: md5\n      md5: 0123\n"), "the 'md5' of 'data' is '0123'"),
        (locked("    - path: data\n      hash: md5\n      md5: [1]\n"), "the 'md5' of 'data' is"),
        (locked(f"    - path: data\n      md5: {MD5}\n      size: many\n"), "the size of 'data' is 'many'"),
        (locked(f"    - path: data\n      md5: {MD5}\n      md5: {MD5}\n"), "line 6, column 7"),
        ("schema: '2.0'\nstages: {a: }{\n", "line 2, column 14, is not valid YAML"),
        ("just a text\n", "is no mapping"),
        ("", "is no mapping"),
        ("[" * 30, "is not valid YAML"),
    ],
)
def test_a_lock_that_dvc_did_not_write_is_refused(lock: Path, text: str, words: str) -> None:
    lock.write_text(text)
    message = refusal(Dvc("data"))
    assert words in message
    assert message.startswith("dvc.lock")


def test_a_key_that_occurs_twice_is_named(lock: Path) -> None:
    lock.write_text(locked(f"    - path: data\n      md5: {MD5}\n") + "  prepare:\n    cmd: other\n")
    assert "the key 'prepare' occurs twice" in refusal(Dvc("data"))


def test_bytes_that_are_no_text_are_refused(lock: Path) -> None:
    lock.write_bytes(b"schema: '2.0'\nstages: {\xff\xfe: 1}\n")
    assert "is not valid YAML" in refusal(Dvc("data"))


def test_parts_that_are_nested_too_deeply_are_refused(lock: Path) -> None:
    lock.write_text("schema: '2.0'\nstages: " + "[" * 100_000 + "]" * 100_000)
    assert "dvc.lock: its parts are nested more than 100 deep" in refusal(Dvc("data"))


def test_the_same_path_in_two_stages_is_refused_with_both(lock: Path) -> None:
    output = f"    outs:\n    - path: data\n      md5: {MD5}\n"
    lock.write_text(f"schema: '2.0'\nstages:\n  one:\n    cmd: a\n{output}  two:\n    cmd: b\n{output}")
    assert "'data' is an output of stage 'one' and stage 'two'" in refusal(Dvc("data"))


def test_a_file_that_is_too_large_is_not_parsed(lock: Path) -> None:
    with lock.open("wb") as file:
        os.truncate(file.fileno(), dvc._MAX_BYTES + 1)
    assert "is larger than 4 MiB" in refusal(Dvc("data"))


def test_a_folder_in_the_place_of_the_lock_is_refused(lock: Path) -> None:
    lock.mkdir()
    assert "cannot be read: Is a directory" in refusal(Dvc("data"))


def test_a_file_that_is_only_called_dvc_is_not_taken_for_one_that_tracks_data(lock: Path) -> None:
    lock.write_bytes((RECORDED / "dvc.lock").read_bytes())
    assert "dvc.lock has no output '.dvc'" in refusal(Dvc(".dvc"), NotFoundError)


@pytest.mark.parametrize(("outputs", "count"), [("outs: []\n", 0), ("{}\n", 0), ("outs: [{path: a}, {path: b}]\n", 2)])
def test_a_dvc_file_of_no_or_several_outputs_is_refused(lock: Path, outputs: str, count: int) -> None:
    (lock.parent / "raw.dvc").write_text(outputs)
    assert f"raw.dvc: it has {count} outputs" in refusal(Dvc("raw.dvc"))


@pytest.mark.parametrize(
    ("entry", "version"),
    [
        (f"md5: {MD5}", f"md5 {MD5}"),
        ("etag: 3fa5-7", "etag 3fa5-7"),
        ("checksum: 0000020000000000", "checksum 0000020000000000"),
        ("hash: md5\n      md5: '12345678901234567890123456789012'", "md5 12345678901234567890123456789012"),
        ("hash: md5\n      md5: 12345678901234567890123456789012", "md5 12345678901234567890123456789012"),
    ],
)
def test_hashes_of_earlier_versions_and_of_other_storage_are_read(lock: Path, entry: str, version: str) -> None:
    lock.write_text(locked(f"    - path: data\n      {entry}\n"))
    assert str(read_data_version(Dvc("data"))) == version
