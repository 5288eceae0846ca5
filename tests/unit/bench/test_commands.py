"""Every benchmark of the Makefile starts: a command that is run twice a year breaks unseen."""

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES = sorted(set(re.findall(r"python -m (bench[\w.]*)", (ROOT / "Makefile").read_text())))


@pytest.mark.parametrize("module", MODULES)
def test_benchmark_shows_its_help(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
        warnings.simplefilter("ignore", RuntimeWarning)  # other tests have imported it already
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert not ended.value.code
    assert "usage:" in capsys.readouterr().out
