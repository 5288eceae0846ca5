"""The command line as a whole: what there is, what holds for all of it, and how it ends."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import structlog
import typer
from typer.main import get_command

import tiphys
from hera_pipelines.cli.error_messages import EXIT_CODES, report
from hera_pipelines.cli.screen import Screen

# Where each command is, and the names of its function and of its examples there.
_COMMANDS = {
    "demo": ("demo.command", "demo", "EXAMPLES"),
    "run": ("cli.commands.run", "run", "EXAMPLES"),
    "compile": ("cli.commands.compile", "compile_file", "EXAMPLES"),
    "plan": ("cli.commands.resume", "plan", "PLAN_EXAMPLES"),
    "resume": ("cli.commands.resume", "resume", "EXAMPLES"),
    "fork": ("cli.commands.fork", "fork", "EXAMPLES"),
    "stop": ("cli.commands.stop", "stop", "EXAMPLES"),
    "why": ("cli.quota_commands.why", "why", "EXAMPLES"),
    "runs": ("cli.commands.runs", "runs", "RUNS_EXAMPLES"),
    "get": ("cli.commands.runs", "get", "GET_EXAMPLES"),
    "lineage": ("cli.commands.lineage", "lineage", "EXAMPLES"),
    "sweep": ("cli.commands.sweep", "sweep", "EXAMPLES"),
    "events": ("cli.commands.runs", "events", "EXAMPLES"),
    "report": ("cli.commands.report", "report", "EXAMPLES"),
    "gc": ("cli.commands.gc", "gc", "EXAMPLES"),
    "janitor": ("cli.commands.janitor", "janitor", "EXAMPLES"),
    "simulate": ("cli.quota_commands.simulate", "simulate", "EXAMPLES"),
    "verify": ("cli.commands.verify", "verify", "EXAMPLES"),
    "doctor": ("cli.commands.doctor", "doctor", "EXAMPLES"),
}
_GROUPS = {
    "checkpoint": "cli.commands.checkpoint",
    "queues": "cli.quota_commands.queues",
    "nodes": "cli.quota_commands.nodes",
}

# These may stand anywhere on the line, as with kubectl.
_ANYWHERE = ("--quiet", "--verbose", "--no-color")

_EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one invocation; return its exit code."""
    given = _global_options_first(list(sys.argv[1:] if arguments is None else arguments))
    screen = Screen(quiet="--quiet" in given, color="--no-color" not in given, verbose="--verbose" in given)
    _log_to_stderr(screen.verbose)
    try:
        result = get_command(_application(given)).main(args=given, prog_name="tiphys", standalone_mode=False)
    except BrokenPipeError:
        # The reader of stdout went away, as `head` does: nobody is left to tell.
        sys.stderr.close()
        return 0
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the last line of defence turns all into one line
        return report(error, screen)
    return result if isinstance(result, int) else 0


def _log_to_stderr(verbose: bool) -> None:
    """The plugin's log is for services; here its answers tell the same, and stdout is for data alone."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("info" if verbose else "critical"),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


def _application(given: Sequence[str]) -> typer.Typer:
    """The command that was asked for, or all: to import what the others need would take most of a second."""
    app = typer.Typer(
        name="tiphys",
        help="Machine-learning training on Argo Workflows that survives. "
        "Data goes to stdout, everything else to stderr.",
        epilog=_EPILOG,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=True,
    )
    app.callback()(_globally)
    first = next((argument for argument in given if argument not in _ANYWHERE), None)
    for name, (module, function, examples) in _COMMANDS.items():
        if first == name or first not in (*_COMMANDS, *_GROUPS):
            found = import_module(f"hera_pipelines.{module}")
            app.command(name, epilog=getattr(found, examples))(getattr(found, function))
    for name, module in _GROUPS.items():
        if first == name or first not in (*_COMMANDS, *_GROUPS):
            app.add_typer(import_module(f"hera_pipelines.{module}").app, name=name)
    return app


def _version(value: bool) -> None:
    if value:
        typer.echo(f"tiphys {tiphys.__version__}")
        raise typer.Exit


def _globally(
    context: typer.Context,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing beside data and errors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the trace of an error.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colour; NO_COLOR does the same.")] = False,
    version: Annotated[  # noqa: ARG001  its callback answers
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    context.obj = Screen(quiet=quiet, color=not no_color, verbose=verbose)


def _global_options_first(arguments: list[str]) -> list[str]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    front = [argument for argument in arguments[:end] if argument in _ANYWHERE]
    return front + [argument for argument in arguments[:end] if argument not in _ANYWHERE] + arguments[end:]
