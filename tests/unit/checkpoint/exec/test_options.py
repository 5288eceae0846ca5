"""The command line of ``tiphys-exec``: what it means, and what is refused with a sentence."""

from pathlib import Path

import pytest

from tiphys.checkpoint.exec.__main__ import main
from tiphys.checkpoint.exec.options import parse_options
from tiphys.errors import UsageError


def test_every_option_but_the_folder_has_a_default():
    options = parse_options(["--dir", "/ckpt", "--", "python", "train.py", "--dir", "x"])
    assert options.folder == Path("/ckpt")
    assert options.command == ("python", "train.py", "--dir", "x")
    assert (options.checkpoint, options.marker, options.step_from) == ("", "", None)
    assert (options.quiet_seconds, options.interval_seconds) == (5.0, 1.0)
    assert options.layout == "auto"
    assert {"*.tmp", ".nfs*", "lost+found", "*.orbax-checkpoint-tmp*"} <= {*options.ignored}


def test_every_option_can_be_given():
    given = ["--checkpoint", "epoch-*", "--quiet", "2m", "--step-from", r"(\d+)", "--ignore", "*.log", "--ignore", "x"]
    options = parse_options(["--dir", "ckpt", *given, "--interval", "200ms", "--", "true", "--"])
    assert options.folder == Path.cwd() / "ckpt"
    assert options.command == ("true", "--")
    assert (options.checkpoint, options.quiet_seconds, options.interval_seconds) == ("epoch-*", 120.0, 0.2)
    assert options.ignored[-2:] == ("*.log", "x")


@pytest.mark.parametrize(
    ("marker", "checkpoint"), [("checkpoint-*/DONE", "checkpoint-*"), ("a/b-*/m", "a/b-*"), ("DONE", "")]
)
def test_a_marker_says_what_a_checkpoint_is(marker, checkpoint):
    assert parse_options(["--dir", "/c", "--marker", marker, "--", "true"]).checkpoint == checkpoint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dir", "/c", "python"], "write -- and the program after the options"),
        (["--dir", "/c", "--"], "there is no program after --"),
        (["--", "true"], "--dir"),
        (["--dir", "/c", "--quiet", "0", "--", "true"], "'0' is not a time above 0"),
        (["--dir", "/c", "--quiet", "soon", "--", "true"], "write 500ms, 5s or 2m"),
        (["--dir", "/c", "--step-from", "(", "--", "true"], "not a regular expression"),
        (["--dir", "/c", "--marker", "/c/DONE", "--", "true"], "must be relative to --dir"),
        (["--dir", "/c", "--checkpoint", "../x", "--", "true"], "must be relative to --dir"),
        (["--dir", "/c", "--marker", "DONE", "--quiet", "5s", "--", "true"], "leave out --checkpoint and --quiet"),
        (
            ["--dir", "/c", "--layout", "hf", "--marker", "DONE", "--", "true"],
            "--layout hf defines",
        ),
        (["--dir", "/c", "--layout", "pickles", "--", "true"], "invalid choice: 'pickles'"),
        (["--dir", "/c", "--often", "--", "true"], "unrecognized arguments: --often"),
    ],
)
def test_an_invalid_command_line_is_refused(arguments, words):
    with pytest.raises(UsageError) as caught:
        parse_options(arguments)
    assert words in str(caught.value)


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "--marker 'checkpoint-*/DONE'" in capsys.readouterr().out


def test_a_wrong_call_is_one_line_and_exit_code_2(capsys):
    assert main(["--dir", "/c"]) == 2
    assert capsys.readouterr().err.startswith("tiphys: write -- and the program")


def test_a_single_wrapper_watches_the_folder_of_an_attempt(monkeypatch, capsys):
    given = {"STORE": "memory", "RUN": "digits-1", "STEP": "fit", "ATTEMPT": "1", "LINEAGE": "digits-1/fit"}
    for name, value in given.items():
        monkeypatch.setenv(f"TIPHYS_{name}", value)
    monkeypatch.setenv("RANK", "1")
    assert main(["--dir", "/c", "--", "true"]) == 2
    assert "rank 1" in capsys.readouterr().err
