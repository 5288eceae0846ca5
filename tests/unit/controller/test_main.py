"""The controller's command line: what is wrong with a call is said in one line, before anything is connected to."""

from pathlib import Path

import pytest
from tiphys_controller import __main__


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--namespace=ml"], "the following arguments are required: --store"),
        (["--store=s3://ml-runs"], "one of the arguments --namespace --all-namespaces is required"),
    ],
)
def test_an_argument_that_is_missing_is_named(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        __main__.main(arguments)
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--store=s3://ml-runs", "--all-namespaces"], "put {namespace} into the URL"),
        (["--store=s3://ml-runs", "--namespace=ml"], "cannot connect to a Kubernetes cluster"),
    ],
)
def test_an_impossible_call_is_refused_in_one_line(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    # What they set holds for the whole process, and other tests share it.
    monkeypatch.setattr(__main__, "configure_json_logging", lambda: None)
    monkeypatch.setattr(__main__.signal, "signal", lambda *_: None)
    assert __main__.main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("tiphys-controller: ")
    assert sentence in line
