"""The archives and lists of a release depend on what is in them, and on nothing else."""

import io
import json
import tarfile

from runner.dist import pack, stable_packages

EPOCH = 1_700_000_000


def test_an_archive_is_the_same_in_any_order_and_has_its_files() -> None:
    files = {"tiphys/b.yaml": b"b", "tiphys/a.yaml": b"a"}
    packed = pack(files, EPOCH)
    assert packed == pack(dict(reversed(files.items())), EPOCH)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert [(entry.name, entry.mtime, entry.mode) for entry in archive] == [
            ("tiphys/a.yaml", EPOCH, 0o644),
            ("tiphys/b.yaml", EPOCH, 0o644),
        ]
        member = archive.extractfile("tiphys/b.yaml")
        assert member is not None
        assert member.read() == b"b"


def test_a_list_of_packages_has_the_time_of_the_commit_and_a_number_of_its_content() -> None:
    def made(number: str, package: str) -> str:
        document = {"serialNumber": number, "metadata": {"timestamp": number, "tools": []}, "components": [package]}
        return stable_packages(document, EPOCH)

    assert made("one", "boto3") == made("two", "boto3")
    assert json.loads(made("one", "boto3"))["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    assert json.loads(made("one", "boto3"))["serialNumber"] != json.loads(made("one", "pydantic"))["serialNumber"]
