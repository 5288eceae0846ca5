"""Where the outputs of steps without a gate lie: below their Workflow and pod, and which attempt a pod was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiphys.errors import UsageError
from tiphys.store import check_key
from tiphys.store.workflow_layout import (
    OutputOrigin,
    output_origin,
    output_origins,
    parse_output_origin,
    parse_pod_output,
    pod_outputs,
    workflow_outputs,
)

UID = "0d3f5c1e-7b1a-4f3c-9a55-1c1f6a2e9f10"
names = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", fullmatch=True)
labels = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)


def test_the_documented_layout() -> None:
    """As in docs/architecture.md."""
    assert pod_outputs(UID, "digits-prep-1") == f"data/workflows/{UID}/digits-prep-1/"
    origin = OutputOrigin("digits-prep-1", "digits", "sweep.0123456789ab.0", 2)
    assert output_origin(UID, origin) == f"control/workflows/{UID}/digits-prep-1/digits/sweep.0123456789ab.0/000000002"


@given(names, st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20))
def test_an_output_is_read_from_its_key(pod: str, name: str) -> None:
    key = f"{pod_outputs(UID, pod)}{name}"
    assert key.startswith(workflow_outputs(UID))
    assert parse_pod_output(key) == (UID, pod, name)


@given(names, names, labels, st.integers(1, 10**9 - 1))
def test_the_origin_of_outputs_is_read_from_its_key(pod: str, run: str, step: str, attempt: int) -> None:
    origin = OutputOrigin(pod, run, step, attempt)
    key = check_key(output_origin(UID, origin))
    assert key.startswith(output_origins(UID, pod))
    assert key.startswith(output_origins(UID))
    assert parse_output_origin(key) == origin


def test_a_pod_is_not_found_below_one_whose_name_begins_as_its_own() -> None:
    key = output_origin(UID, OutputOrigin("digits-prep-10", "digits", "prep", 1))
    assert not key.startswith(output_origins(UID, "digits-prep-1"))


@pytest.mark.parametrize(
    "key",
    [
        "",
        f"data/workflows/{UID}/pod",
        f"data/workflows/{UID}/pod/",
        f"data/workflows/{UID}",
        f"control/workflows/{UID}/pod/digits/prep/000000001",
        f"prefix/data/workflows/{UID}/pod/x",
        "data/runs/digits/outputs/prep/000000001/artifacts/x",
    ],
)
def test_any_other_key_is_no_output_of_a_pod(key: str) -> None:
    assert parse_pod_output(key) is None


@pytest.mark.parametrize(
    "key",
    [
        f"control/workflows/{UID}/pod/digits/prep/1",
        f"control/workflows/{UID}/pod/digits/prep/000000001/more",
        f"control/workflows/{UID}/pod/prep/000000001",
        f"data/workflows/{UID}/pod/digits/prep/000000001",
    ],
)
def test_any_other_key_is_no_origin(key: str) -> None:
    assert parse_output_origin(key) is None


def test_a_step_that_cannot_be_a_key_is_refused() -> None:
    with pytest.raises(UsageError):
        output_origin(UID, OutputOrigin("pod", "digits", "../prep", 1))
