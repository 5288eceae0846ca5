"""What a manifest says that a checkpoint was made with."""

import importlib.metadata
import platform
import sys
import types

import numpy as np
import pytest
from support.builders.lineage import RUN, STEP, claim_of, ref
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import open_session

from tiphys.checkpoint.telemetry import provenance
from tiphys.errors import UsageError
from tiphys.lineage.validity import read_manifest
from tiphys.records import Provenance
from tiphys.store import RunLayout


def test_provenance_outside_of_a_compiled_step_has_the_versions_only():
    found = provenance.gather_provenance({})
    assert found == Provenance(versions=found.versions)
    assert found.versions["python"] == platform.python_version()


def test_image_and_commit_come_from_the_environment():
    found = provenance.gather_provenance({"TIPHYS_IMAGE": "i@sha256:ab", "TIPHYS_GIT_COMMIT": "c0ffee"})
    assert (found.image, found.git_commit) == ("i@sha256:ab", "c0ffee")


@pytest.mark.parametrize("variable", ["GIT_COMMIT", "SOURCE_COMMIT", "GITHUB_SHA", "CI_COMMIT_SHA"])
def test_a_commit_that_the_builder_left_in_the_image_is_found_and_what_compile_says_goes_first(variable):
    assert provenance.gather_provenance({variable: "image"}).git_commit == "image"
    assert provenance.gather_provenance({variable: "image", "TIPHYS_GIT_COMMIT": "compiled"}).git_commit == "compiled"


def test_parameters_and_data_are_those_of_the_claim():
    store = MemoryStore()
    claim = claim_of(1).model_copy(update={"parameters": "p" * 64, "dataset": "d" * 64})
    store.create(RunLayout(RUN).attempt(STEP, 1), claim.to_bytes())
    with open_session(store, admit=False) as session:
        session.save(1, {"x": 1})
    found = read_manifest(store, ref(1, 1)).facts
    assert (found.parameters, found.dataset) == ("p" * 64, "d" * 64)


def test_position_and_epoch_are_kept_in_plain_form():
    found = provenance.gather_provenance(
        {}, epoch=np.int64(3), data_position={"sample": np.int32(7), "share": np.float64(0.5), 1: "a"}
    )
    assert found.epoch == 3
    assert found.data_position == {"sample": 7, "share": 0.5, "1": "a"}
    assert Provenance.model_validate_json(found.to_bytes()) == found


def test_a_position_that_is_no_number_is_kept_as_text():
    assert provenance.gather_provenance({}, data_position={"loss": float("nan")}).data_position == {"loss": "nan"}


@pytest.mark.parametrize("position", [{"a": [1]}, {"a": None}, {"a": np.zeros(3)}])
def test_a_position_that_is_no_scalar_is_refused_by_name(position):
    with pytest.raises(UsageError, match=r"data_position\['a'\]"):
        provenance.gather_provenance({}, data_position=position)


@pytest.mark.parametrize("epoch", [1.5, "3", True])
def test_an_epoch_is_a_whole_number(epoch):
    with pytest.raises(UsageError, match="epoch"):
        provenance.gather_provenance({}, epoch=epoch)


@pytest.mark.parametrize(("text", "size"), [("4", 4), ("", 1), ("0", 1), ("many", 1)])
def test_the_world_is_as_large_as_the_launcher_says(text, size):
    assert provenance.gather_provenance({"WORLD_SIZE": text}).world_size == size
    assert provenance.gather_provenance({"WORLD_SIZE": text}, world_size=2).world_size == 2


def test_only_what_is_loaded_is_named_and_nothing_is_imported():
    before = set(sys.modules)
    found = provenance.package_versions()
    assert found["numpy"] == importlib.metadata.version("numpy")
    assert set(found) - {"python"} <= {package for module, package in provenance.PACKAGES.items() if module in before}
    assert set(sys.modules) == before


def test_a_module_that_no_package_brought_has_no_version(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgboost", types.ModuleType("xgboost"))
    assert "xgboost" not in provenance.package_versions()


def test_versions_are_looked_up_once(monkeypatch):
    versions = provenance.package_versions()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: pytest.fail(f"looked up {name} again"))
    assert provenance.package_versions() == versions
