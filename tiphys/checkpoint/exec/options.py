"""The command line of ``tiphys-exec``: what of a folder is a checkpoint, and when it is whole."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tiphys.errors import UsageError

IGNORED = ("*.tmp", ".nfs*", "lost+found")
"""Names that are not yet, or never, part of a checkpoint."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_SECONDS = {"ms": 0.001, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0}

_EPILOG = """\
examples:
  tiphys-exec --dir /ckpt --marker 'checkpoint-*/DONE' --step-from 'checkpoint-(\\d+)' -- python train.py
  tiphys-exec --dir /ckpt --checkpoint 'epoch-*' --quiet 30s -- ./train.sh --epochs 90
  tiphys-exec --dir /ckpt -- trainer --save-to /ckpt/last.bin

exit codes: the program's own, but 75 after SIGTERM (try again), 76 when another attempt took its place,
69 when storage was out of reach before it started, 126 and 127 as a shell has them.
Outside of a compiled training step the program runs as if tiphys-exec were not there.
"""


@dataclass(frozen=True)
class Options:
    """What the caller asked for."""

    folder: Path
    command: tuple[str, ...]
    checkpoint: str = ""
    """Pattern of the folders or files that are a checkpoint each; empty: everything together is one."""
    marker: str = ""
    """Pattern of the file that says that the checkpoint beside it is whole; empty: quiet time says so."""
    quiet_seconds: float = 5.0
    step_from: re.Pattern[str] | None = None
    ignored: tuple[str, ...] = IGNORED
    interval_seconds: float = 1.0


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        UsageError: it makes no sense; the message says why.
    """
    own, command = _split(arguments)
    given = _parser().parse_args(own)
    if given.marker and (given.checkpoint or given.quiet is not None):
        raise UsageError("--marker says what a checkpoint is and when it is whole; leave out --checkpoint and --quiet")
    for pattern in (given.marker, given.checkpoint):
        if pattern.startswith("/") or ".." in pattern.split("/"):
            raise UsageError(f"{pattern!r} must be relative to --dir, as 'checkpoint-*/DONE' is")
    quiet = 5.0 if given.quiet is None else given.quiet
    return Options(
        folder=given.dir.absolute(),
        command=command,
        checkpoint=given.marker.rpartition("/")[0] or given.checkpoint,
        marker=given.marker,
        quiet_seconds=quiet,
        step_from=given.step_from,
        ignored=(*IGNORED, *given.ignore),
        interval_seconds=given.interval,
    )


def _split(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    if "--" not in arguments:
        if any(word in ("-h", "--help") for word in arguments):
            return list(arguments), ()
        raise UsageError("write -- and the program behind the options: tiphys-exec --dir /ckpt -- python train.py")
    place = list(arguments).index("--")
    command = tuple(arguments[place + 1 :])
    if not command:
        raise UsageError("there is no program behind --; write tiphys-exec --dir /ckpt -- python train.py")
    return list(arguments[:place]), command


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # this one returns to its caller, as an error
        raise UsageError(f"{message}; see tiphys-exec --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tiphys-exec",
        usage="tiphys-exec --dir DIR [options] -- PROGRAM [ARGS…]",
        description="Run a program that writes checkpoints as files, and keep them as Tiphys keeps its own.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dir", type=Path, required=True, metavar="DIR", help="the folder that the program writes")
    parser.add_argument(
        "--checkpoint", default="", metavar="GLOB", help="each of these is a checkpoint; default: DIR as a whole"
    )
    parser.add_argument(
        "--marker", default="", metavar="GLOB", help="a checkpoint is whole once this file is there, last of all"
    )
    parser.add_argument(
        "--quiet", type=_seconds, metavar="TIME", help="it is whole when nothing changed for so long; default: 5s"
    )
    parser.add_argument(
        "--step-from", type=_pattern, metavar="REGEX", help="global step in the name; default: commits are counted"
    )
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="GLOB", help=f"names to leave out, besides {' '.join(IGNORED)}"
    )
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="TIME", help="between looks; default: 1s")
    return parser


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    if not match or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time above 0; write 500ms, 5s or 2m")
    return float(match[1]) * _SECONDS[match[2]]


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
