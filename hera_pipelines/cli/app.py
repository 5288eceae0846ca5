"""Entry point of the ``tiphys`` command.

Holds the table of commands, the global options, and the exit codes. A command's
module is imported only when its command runs or completes: the help of all and
the completion of names are asked for often, and this table alone answers them.
"""

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import tiphys
from hera_pipelines.cli import exit_on_interrupt
from hera_pipelines.cli.error_messages import EXIT_CODES, report_error
from hera_pipelines.cli.screen import Screen, guard_streams


class CommandSource(NamedTuple):
    """Where a command is defined, and the sentence for the list of commands: the first of its own help."""

    summary: str
    module: str
    function: str = ""
    """Empty for the name of the command."""
    examples: str = "EXAMPLES"
    """Constant of the module with the examples for the command's help."""
    is_group: bool = False
    """Whether it is a group of commands, whose module holds an ``app``."""
    logs: bool = False
    """Whether it runs code of the services or a pipeline file, which log."""

    def load(self, name: str) -> Any:
        """Import the module and build the command."""
        module = import_module(f"hera_pipelines.{self.module}")
        application = typer.Typer(add_completion=False, rich_markup_mode=None)
        if not self.is_group:
            function = getattr(module, self.function or name)
            application.command(name, epilog=getattr(module, self.examples))(function)
            return get_command(application)
        application.add_typer(module.app, name=name)
        return get_command(application).commands[name]  # type: ignore[attr-defined]


COMMAND_GROUPS = {
    "Start a run": {
        "demo": CommandSource(
            "Train a digit classifier, break it, and resume it bit by bit.", "demo.command", logs=True
        ),
        "run": CommandSource("Run a pipeline on this machine or on a cluster.", "cli.start.run", logs=True),
        "fork": CommandSource("Start a new run from the results of another run.", "cli.start.fork", logs=True),
        "attach": CommandSource(
            "Follow a run that is detached, or runs in another terminal or on a cluster.", "cli.start.attach"
        ),
        "stop": CommandSource("Stop a run on this machine or on its cluster.", "cli.start.stop"),
    },
    "Look at runs": {
        "runs": CommandSource(
            "List the runs of a store, with phase and finished steps; compare two of them, or delete runs.",
            "cli.look.runs",
            is_group=True,
        ),
        "get": CommandSource(
            "Show one run: submissions, steps, attempts and outputs.", "cli.look.runs", examples="GET_EXAMPLES"
        ),
        "why": CommandSource(
            "Explain why a run does not go on: what it waits for, or how its steps failed.", "cli.look.why", logs=True
        ),
        "logs": CommandSource("Print the output of the programs of a run.", "cli.look.logs"),
        "events": CommandSource(
            "Print the events of a run in order of time.", "cli.look.runs", examples="EVENTS_EXAMPLES"
        ),
        "lineage": CommandSource("Show the checkpoints of a run and where each came from.", "cli.look.lineage"),
        "sweep": CommandSource("List the trials of a sweep, and mark the best one.", "cli.look.sweep"),
        "report": CommandSource("Report what failures cost: goodput, lost training, recovery.", "cli.look.report"),
        "ui": CommandSource("Show the runs of a store as web pages.", "cli.look.ui", logs=True),
        "traces": CommandSource("Send runs as traces to an OpenTelemetry collector.", "traces.command"),
    },
    "Repair": {
        "plan": CommandSource(
            "Show which steps a resume would run or skip, and why.", "cli.repair.resume", examples="PLAN_EXAMPLES"
        ),
        "resume": CommandSource("Resume a run: submit the steps that are missing.", "cli.repair.resume", logs=True),
        "recover": CommandSource(
            "Resume all runs of a cluster that is gone, on the cluster of the kubeconfig.",
            "cli.repair.recover",
            logs=True,
        ),
        "verify": CommandSource("Verify a run's records, checkpoints and outputs.", "cli.repair.verify"),
        "register": CommandSource(
            "Register models of a run in MLflow that were requested and are not complete.", "cli.repair.register"
        ),
    },
    "GPUs": {
        "queues": CommandSource("Set and show the GPU quotas of a cluster.", "cli.gpus.queues", is_group=True),
        "nodes": CommandSource("List the nodes with GPUs, with free GPUs and health.", "cli.gpus.nodes", logs=True),
        "simulate": CommandSource("Replay a trace of jobs under the quotas of a queue file.", "cli.gpus.simulate"),
    },
    "Store": {
        "checkpoint": CommandSource(
            "List, inspect and pin checkpoints of a run.", "cli.store.checkpoint", is_group=True
        ),
        "cache": CommandSource(
            "Show and drop results that steps share between runs.", "cli.store.cache", is_group=True
        ),
        "gc": CommandSource("Mark and delete checkpoints that no retention rule keeps.", "cli.store.gc"),
        "janitor": CommandSource(
            "Run one cleanup round, as the controller does every hour.", "cli.store.janitor", logs=True
        ),
    },
    "Author": {
        "compile": CommandSource(
            "Compile a pipeline and print the Workflow.", "cli.author.compile", "compile_file", logs=True
        ),
        "preflight": CommandSource(
            "Find out what would go wrong with a pipeline, before it is submitted.", "cli.author.preflight", logs=True
        ),
        "adopt": CommandSource("Find out what Tiphys can make of Workflows written as YAML.", "cli.author.adopt"),
        "import-kfp": CommandSource(
            "Translate a pipeline of Kubeflow into a Workflow with marked steps.", "cli.author.import_kfp", "import_kfp"
        ),
    },
    "Cluster": {
        "doctor": CommandSource("Check whether a store or a cluster is fit for runs.", "cli.cluster.doctor"),
        "conformance": CommandSource(
            "Prove on a bucket and a cluster what runs rest on, and report what held.", "conformance.command", logs=True
        ),
        "triggers": CommandSource(
            "List the triggers of a namespace: their objects, and the last run.", "cli.cluster.triggers", logs=True
        ),
    },
}
"""By what people look for, as the help of ``tiphys`` shows them."""
COMMANDS = {name: source for group in COMMAND_GROUPS.values() for name, source in group.items()}


class LazyGroup(TyperGroup):
    """The commands of `COMMANDS`; each stands for itself by its summary until it is resolved."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=source.summary) for name, source in COMMANDS.items()}

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  the signature is click's
        """Write the commands under their headings, with whole sentences."""
        for heading, group in COMMAND_GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, source.summary) for name, source in group.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name is None:
            return name, command, rest
        source = COMMANDS[name]
        if source.logs:
            _log_to_stderr(ctx.params["verbose"])
        with exit_on_interrupt():
            return name, source.load(name), rest


def _log_to_stderr(verbose: bool) -> None:
    """Send the log of the services' code to stderr. Without ``verbose`` only critical lines appear."""
    import structlog  # takes as long as all else that the help of ``tiphys`` needs

    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[*structlog.get_config()["processors"][:-1], plain],
        wrapper_class=structlog.make_filtering_bound_logger("info" if verbose else "critical"),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


# Accepted before and after the command name, as kubectl does.
_GLOBAL_OPTIONS = ("--quiet", "--verbose", "--no-color")

_EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (default: ``sys.argv``) and return its exit code."""
    try:
        with guard_streams():
            code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()  # here, and not at exit, where a closed pipe would be reported
        return code
    except BrokenPipeError:
        # The reader has closed the pipe, as `head` does: that is no failure. What is still in the buffer goes
        # nowhere. Source: Python's signal documentation, "Note on SIGPIPE".
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: Sequence[str]) -> int:
    arguments = _global_options_first(list(arguments))
    for library in ("httpx", "uvicorn", "botocore", "urllib3"):
        # The `logging.basicConfig` of an author's file is about the author's program, and not about this command.
        logging.getLogger(library).setLevel(logging.WARNING)
    screen = Screen(quiet="--quiet" in arguments, color="--no-color" not in arguments, verbose="--verbose" in arguments)
    try:
        application = get_command(_build_application())
        result = application.main(args=arguments, prog_name="tiphys", standalone_mode=False)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):
            raise ended.__context__ from None  # Typer exits with 1
        raise
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  every failure ends as one line and an exit code
        return report_error(error, screen)
    return result if isinstance(result, int) else 0


def _build_application() -> typer.Typer:
    app = typer.Typer(
        name="tiphys",
        cls=LazyGroup,
        help="Run machine-learning training on Argo Workflows, and resume it after preemptions, crashes and lost "
        "clusters. Commands print data on stdout, and progress and errors on stderr.",
        epilog=_EPILOG,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=True,
    )
    app.callback()(_set_global_options)
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
    front = [word for word in arguments[:end] if word in _GLOBAL_OPTIONS]
    return front + [word for word in arguments[:end] if word not in _GLOBAL_OPTIONS] + arguments[end:]
