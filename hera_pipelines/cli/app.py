"""Entry point of the ``tiphys`` command.

Holds the table of commands, the global options, and the exit codes. A command's
module is imported only when it runs, because importing all of them takes most
of a second.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import structlog
import typer
from typer.main import get_command

import tiphys
from hera_pipelines.cli.error_messages import EXIT_CODES, report_error
from hera_pipelines.cli.screen import Screen, guard_streams

# Command → (module, function, constant with the examples for its help).
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
    "events": ("cli.commands.runs", "events", "EVENTS_EXAMPLES"),
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

# Accepted before and after the command name, as kubectl does.
_GLOBAL_OPTIONS = ("--quiet", "--verbose", "--no-color")

_EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (default: ``sys.argv``) and return its exit code."""
    try:
        with guard_streams():
            return _run(sys.argv[1:] if arguments is None else arguments)
    except BrokenPipeError:
        # The reader of stdout has closed the pipe, as `head` does. Closing stderr keeps the interpreter from
        # reporting the same error again at exit.
        sys.stderr.close()
        return 0


def _run(arguments: Sequence[str]) -> int:
    arguments = _global_options_first(list(arguments))
    screen = Screen(quiet="--quiet" in arguments, color="--no-color" not in arguments, verbose="--verbose" in arguments)
    _log_to_stderr(screen.verbose)
    try:
        application = get_command(_build_application(arguments))
        result = application.main(args=arguments, prog_name="tiphys", standalone_mode=False)
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  every failure ends as one line and an exit code
        return report_error(error, screen)
    return result if isinstance(result, int) else 0


def _log_to_stderr(verbose: bool) -> None:
    """Send the plugin's log to stderr, since stdout is for data. Without ``--verbose`` only critical lines appear."""
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[*structlog.get_config()["processors"][:-1], plain],
        wrapper_class=structlog.make_filtering_bound_logger("info" if verbose else "critical"),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


def _build_application(arguments: Sequence[str]) -> typer.Typer:
    """Build the application with the command that ``arguments`` name, or with all commands if they name none."""
    app = typer.Typer(
        name="tiphys",
        help="Run machine-learning training on Argo Workflows, and resume it after preemptions, crashes and lost "
        "clusters. Commands print data on stdout, and progress and errors on stderr.",
        epilog=_EPILOG,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=True,
    )
    app.callback()(_set_global_options)
    first = next((argument for argument in arguments if argument not in _GLOBAL_OPTIONS), None)
    for name, (module, function, examples) in _COMMANDS.items():
        if first == name or first not in (*_COMMANDS, *_GROUPS):
            command_module = import_module(f"hera_pipelines.{module}")
            app.command(name, epilog=getattr(command_module, examples))(getattr(command_module, function))
    for name, module in _GROUPS.items():
        if first == name or first not in (*_COMMANDS, *_GROUPS):
            app.add_typer(import_module(f"hera_pipelines.{module}").app, name=name)
    return app


def _version(value: bool) -> None:
    if value:
        typer.echo(f"tiphys {tiphys.__version__}")
        raise typer.Exit


def _set_global_options(
    context: typer.Context,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only data and errors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the traceback of an error.")] = False,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="Print without colour, as the variable NO_COLOR does.")
    ] = False,
    version: Annotated[  # noqa: ARG001  its callback prints the version
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    context.obj = Screen(quiet=quiet, color=not no_color, verbose=verbose)


def _global_options_first(arguments: list[str]) -> list[str]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    front = [argument for argument in arguments[:end] if argument in _GLOBAL_OPTIONS]
    return front + [argument for argument in arguments[:end] if argument not in _GLOBAL_OPTIONS] + arguments[end:]
