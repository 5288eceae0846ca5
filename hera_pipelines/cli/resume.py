"""``tiphys resume``: go on with a run from storage alone."""

from typing import Annotated

import typer
from tiphys_controller import resume as resume_run

from hera_pipelines.cli.execution import (
    CodeOption,
    EngineOptions,
    Job,
    PortOption,
    QueuesOption,
    SpeedOption,
    StateOption,
    carry_out,
    local_engine,
    remembered_code,
)
from hera_pipelines.cli.location import DEFAULT_STATE, StoreOption, existing_store, must_be_named
from hera_pipelines.cli.plan import show_plan
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.local.session import LocalSession

EXAMPLES = """\b
Examples:
  tiphys resume digits-7xk2p --dry-run
  tiphys resume digits-7xk2p
"""


def resume(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and submit nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Take the work away from a submission that may still be running.")
    ] = False,
    store: StoreOption = None,
    state: StateOption = DEFAULT_STATE,
    queues: QueuesOption = None,
    plugin_port: PortOption = 0,
    speed: SpeedOption = 1.0,
    code: CodeOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the plan.")] = Format.TABLE,
) -> None:
    """Run what is still missing of a run, here.

    Works with the Workflow, the cluster and the engine's folder gone: the plan
    goes to stdout, progress to stderr.
    """
    screen: Screen = context.obj
    place = existing_store(screen, store)
    if dry_run:
        # A session that is not entered starts nothing; it only says what is alive.
        show_plan(screen, resume_run(place, LocalSession(place, state), run, dry_run=True).plan, output)
        return
    options = EngineOptions(state, queues, plugin_port, speed, code or remembered_code(place, run))
    with local_engine(place, options) as (session, watch):
        resumed = resume_run(place, session, run, force=force)
        show_plan(screen, resumed.plan, output)
        screen.out.file.flush()
        if resumed.submission is not None:
            screen.note(f"submission {resumed.submission} of run {run}")
            carry_out(screen, session, watch, Job(run, resumed.workflow_name, place, state, must_be_named(store)))
        else:
            screen.note(f"nothing is missing of run {run}")
