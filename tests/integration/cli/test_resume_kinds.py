"""Other ways to go on with a run than doing what is missing, as a person meets them."""

from pathlib import Path

from support import tiny

from .conftest import Command


def test_a_run_is_begun_once_for_each_idempotency_key(tiphys: Command, tmp_path: Path) -> None:
    file = tiny.write(tmp_path / "code")
    first = tiphys("run", file, "--idempotency-key", "nightly", "-p", "steps=1")
    again = tiphys("run", file, "--idempotency-key", "nightly", "-p", "steps=1")
    other = tiphys("run", file, "--idempotency-key", "nightly", "-p", "steps=2")

    assert (first.code, again.code, other.code) == (0, 0, 4)
    assert again.out == first.out
    assert "begun before, under the same idempotency key" in again.err
    assert f"start run {first.out.strip()}" in other.error
    assert tiny.ran(tmp_path / "code") == ["prepare", "fit", "report"]
