"""The archives and lists of a release depend on what is in them, and on nothing else."""

import io
import json
import re
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml
from runner.dist import (
    CHART,
    CHECK_AND_INSTALL,
    NAMESPACE,
    ROOT,
    SUMS,
    find_missing,
    pack,
    pin_image,
    read_release_notes,
    stable_packages,
)

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


CHANGELOG = """# Changelog

## [Unreleased]

### Changed

- What comes next.

## [0.1.0] - 2026-12-01

### Added

- **All of it.**

## [0.0.1] - 2026-01-01

- The beginning.

## Before 0.0.1

- What nobody has.
"""


def test_release_notes_are_the_section_of_the_version() -> None:
    assert read_release_notes(CHANGELOG, "0.1.0") == "# Tiphys 0.1.0\n\n### Added\n\n- **All of it.**\n"
    assert read_release_notes(CHANGELOG, "0.0.1").endswith("- The beginning.\n")
    assert "What comes next." in read_release_notes(CHANGELOG, "0.2.0"), "before the section is written"
    with pytest.raises(SystemExit, match=r"says nothing about 0\.2\.0"):
        read_release_notes("# Changelog\n\n## [Unreleased]\n\n## [0.1.0]\n\n- x\n", "0.2.0")


def test_release_notes_of_the_present_version_are_one_page_of_what_it_does() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    notes = read_release_notes((ROOT / "CHANGELOG.md").read_text(), version)
    assert 20 < len(notes.splitlines()) < 100
    assert not re.search(r"\]\((?!https?:)", notes), "the pages of the repository are not beside RELEASE.md"


def test_release_notes_check_the_signature_by_the_commands_of_the_page() -> None:
    commands = [line for line in CHECK_AND_INSTALL.splitlines() if re.match("echo|ssh-keygen|sha256sum", line)]
    assert "\n".join(commands) in (ROOT / "docs" / "versions.md").read_text()
    assert NAMESPACE in commands[1]
    assert SUMS in commands[2]


def test_chart_of_a_release_names_its_image_by_digest_and_nothing_else_changes() -> None:
    values = (ROOT / CHART / "values.yaml").read_text()
    digest = f"sha256:{'1' * 64}"
    pinned = pin_image(values, f"registry.example.com/team/tiphys@{digest}")
    before, after = yaml.safe_load(values), yaml.safe_load(pinned)
    assert after["image"] == {**before["image"], "repository": "registry.example.com/team/tiphys", "digest": digest}
    assert {**after, "image": before["image"]} == before
    assert pinned.count("#") == values.count("#"), "the comments stay"
    assert pin_image(values, "") == values


def test_release_that_lacks_files_names_them_with_their_remedy(tmp_path: Path) -> None:
    notes, tag, images, signature = find_missing(CHANGELOG, "0.2.0", ["v0.1.0"], repository="", key="")
    assert "CHANGELOG.md has no section [0.2.0]" in notes
    assert "`git tag v0.2.0`" in tag
    assert "REPOSITORY=registry.example.com/team" in images
    assert "SHA256SUMS.sig: give KEY=FILE" in signature
    key = tmp_path / "key"
    key.touch()
    assert list(find_missing(CHANGELOG, "0.1.0", ["v0.1.0"], repository="", key=str(key))) == [images]
    with pytest.raises(SystemExit, match="is no file; `ssh-keygen -t ed25519"):
        list(find_missing(CHANGELOG, "0.1.0", ["v0.1.0"], repository="", key=str(tmp_path / "none")))


def test_images_need_the_builder_of_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nexit 1\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="`docker buildx`, which builds and pushes images, is not here"):
        list(find_missing(CHANGELOG, "0.1.0", ["v0.1.0"], repository="registry.example.com", key=""))
    docker.unlink()
    with pytest.raises(SystemExit, match="is not here"):
        list(find_missing(CHANGELOG, "0.1.0", ["v0.1.0"], repository="registry.example.com", key=""))
