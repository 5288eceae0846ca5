"""The command line of ``tiphys-exec``: which files are a checkpoint, and when it is complete."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tiphys.checkpoint.exec.layouts import AUTO, LAYOUT_NAMES, TEMPORARY_PATTERNS, WHOLE
from tiphys.errors import UsageError
from tiphys.protocol.quantities import parse_duration_seconds

INSTALL_OPTION = "--install"
_EPILOG = """\
examples:
  tiphys-exec --dir /ckpt -- python train.py --output /ckpt           reads the usual layouts by itself
  tiphys-exec --dir /ckpt --layout hf -- python run_clm.py --output_dir /ckpt
  tiphys-exec --dir /ckpt --marker 'checkpoint-*/DONE' --step-from 'checkpoint-(\\d+)' -- python train.py
  tiphys-exec --dir /ckpt --checkpoint 'epoch-*' --quiet 30s -- ./train.sh --epochs 90
  tiphys-exec --install /tiphys        copies itself and its Python into a folder, for images that have neither

exit codes: the program's own; 75 after SIGTERM (retry), 76 if another attempt replaced this one,
69 if storage was out of reach before the program started, 126 and 127 as in a shell.
Outside of a compiled training step the program runs without tiphys-exec.
"""


@dataclass(frozen=True)
class ExecOptions:
    """The parsed command line."""

    folder: Path
    command: tuple[str, ...]
    checkpoint: str = ""
    """Pattern of the folders or files of a checkpoint; empty: names are read as ``layout`` says."""
    layout: str = AUTO
    """One of `LAYOUT_NAMES`."""
    marker: str = ""
    """Pattern of the file that marks the checkpoint beside it as complete; empty: it is complete after a quiet time."""
    quiet_seconds: float = 5.0
    """Without a marker, a checkpoint is complete after this time without a change."""
    step_from: re.Pattern[str] | None = None
    """Finds the global step in the name of a checkpoint; None: it is the number in the name."""
    ignored: tuple[str, ...] = TEMPORARY_PATTERNS
    interval_seconds: float = 1.0
    """Time between two scans of the folder."""

    @property
    def takes_names(self) -> bool:
        """Whether the options, not the names of libraries, say which files are a checkpoint."""
        return bool(self.checkpoint or self.marker) or self.layout == WHOLE

    @property
    def wanted_names(self) -> str:
        """The option that says what a checkpoint is, for messages."""
        return f"--checkpoint {self.checkpoint}" if self.checkpoint else f"--layout {self.layout}"


def parse_options(arguments: Sequence[str]) -> ExecOptions:
    """Read the command line.

    Raises:
        UsageError: an option is invalid, or two options contradict each other.
    """
    options, command = _split_command(arguments)
    parsed = _parser().parse_args(options)
    if parsed.marker and (parsed.checkpoint or parsed.quiet is not None):
        raise UsageError(
            "--marker defines what a checkpoint is and when it is complete; leave out --checkpoint and --quiet"
        )
    if parsed.layout != AUTO and (parsed.marker or parsed.checkpoint):
        raise UsageError(f"--layout {parsed.layout} defines what a checkpoint is; leave out --checkpoint and --marker")
    for pattern in (parsed.marker, parsed.checkpoint):
        if pattern.startswith("/") or ".." in pattern.split("/"):
            raise UsageError(f"{pattern!r} must be relative to --dir, such as 'checkpoint-*/DONE'")
    quiet = 5.0 if parsed.quiet is None else parsed.quiet
    return ExecOptions(
        folder=parsed.dir.absolute(),
        command=command,
        checkpoint=parsed.marker.rpartition("/")[0] or parsed.checkpoint,
        marker=parsed.marker,
        layout=parsed.layout,
        quiet_seconds=quiet,
        step_from=parsed.step_from,
        ignored=(*TEMPORARY_PATTERNS, *parsed.ignore),
        interval_seconds=parsed.interval,
    )


def _split_command(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    if "--" not in arguments:
        if any(argument in ("-h", "--help") for argument in arguments):
            return list(arguments), ()
        raise UsageError("write -- and the program after the options: tiphys-exec --dir /ckpt -- python train.py")
    separator = list(arguments).index("--")
    command = tuple(arguments[separator + 1 :])
    if not command:
        raise UsageError("there is no program after --; write tiphys-exec --dir /ckpt -- python train.py")
    return list(arguments[:separator]), command


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # raises instead of exiting
        raise UsageError(f"{message}; see tiphys-exec --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tiphys-exec",
        usage="tiphys-exec --dir DIR [options] -- PROGRAM [ARGS…]",
        description="Run a program that writes checkpoints as files; commit, verify and restore them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dir", type=Path, required=True, metavar="DIR", help="folder that the program writes to")
    parser.add_argument(
        "--layout",
        default=AUTO,
        choices=LAYOUT_NAMES,
        metavar="NAME",
        help=f"how the library writes checkpoints: {', '.join(LAYOUT_NAMES)}; default: auto, by the names in DIR",
    )
    parser.add_argument(
        "--checkpoint", default="", metavar="GLOB", help="the matches of one step are one checkpoint; default: --layout"
    )
    parser.add_argument(
        "--marker", default="", metavar="GLOB", help="file that the program writes last: its checkpoint is complete"
    )
    parser.add_argument(
        "--quiet",
        type=_parse_time,
        metavar="TIME",
        help="a checkpoint is complete after this time without a change; default: 5s",
    )
    parser.add_argument(
        "--step-from",
        type=_parse_pattern,
        metavar="REGEX",
        help="global step in the name; default: the number in it, or a count of the commits",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="GLOB",
        help=f"names to ignore, besides {' '.join(TEMPORARY_PATTERNS)}",
    )
    parser.add_argument(
        "--interval", type=_parse_time, default=1.0, metavar="TIME", help="time between two scans of DIR; default: 1s"
    )
    return parser


def _parse_time(text: str) -> float:
    try:
        seconds = parse_duration_seconds(text)
    except UsageError:
        seconds = 0.0
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time above 0; write 500ms, 5s or 2m")
    return seconds


def _parse_pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error
