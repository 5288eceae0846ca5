"""``tiphys run``: a pipeline on this machine, without a cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tiphys_controller import start
from tiphys_plugin import load_queues

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
    remember_code,
)
from hera_pipelines.cli.loading import PipelineOption, load
from hera_pipelines.cli.location import DEFAULT_STATE, WritingStoreOption, must_be_named, store_for_writing
from hera_pipelines.cli.parameters import ParameterOption, parse, require_values, with_parameters
from hera_pipelines.cli.screen import Screen
from tiphys.protocol.pipeline import Manifest

if TYPE_CHECKING:
    from hera_pipelines.loading import AnyPipeline

EXAMPLES = """\b
Examples:
  tiphys run digits.py
  tiphys run digits.py -p lr=0.3 --run digits-hot
  tiphys run digits.py --queues queues.yaml --store s3://ml/tiphys
"""


def run(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Python file that defines a Pipeline.")],
    which: PipelineOption = None,
    parameter: ParameterOption = None,
    name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Name of the run; else one is made.")
    ] = None,
    store: WritingStoreOption = None,
    state: StateOption = DEFAULT_STATE,
    queues: QueuesOption = None,
    plugin_port: PortOption = 0,
    speed: SpeedOption = 1.0,
    code: CodeOption = None,
) -> None:
    """Run a pipeline here, with real processes and the same plugin as on a cluster.

    The name of the run goes to stdout, its progress to stderr. Ctrl-C stops the
    run and lets it save; a second one ends it at once.
    """
    screen: Screen = context.obj
    pipeline = load(file, which)
    place = store_for_writing(screen, store, pipeline.store)
    options = EngineOptions(state, queues, plugin_port, speed, code or file.parent)
    manifest = with_parameters(_compiled(pipeline, place.url, queues), parse(parameter or []))
    require_values(manifest)
    remember_code(manifest, code or file.parent)
    with local_engine(place, options) as (session, watch):
        started = start(place, session, manifest, name)
        screen.write(started.run)
        screen.out.file.flush()
        job = Job(started.run, started.workflow_name, place, state, must_be_named(store, pipeline.store))
        carry_out(screen, session, watch, job)


def _compiled(pipeline: "AnyPipeline", store: str, queues: Path | None) -> Manifest:
    from hera_pipelines import CronPipeline  # imports Hera, for which no other command should wait

    known = frozenset(queue.name for queue in load_queues(queues).queues) if queues else None
    if isinstance(pipeline, CronPipeline):
        return pipeline.workflow(store=store, queues=known)
    return pipeline.compile(store=store, queues=known)
