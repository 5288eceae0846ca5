"""Where no checkpoint can land, did compile say so beforehand?"""

from bench.checkpoint.situations import Cell
from support.builders.authored_workflows import STORE, train, workflow

from hera_pipelines.compile import CompileOptions, compile_workflow
from tiphys.errors import UsageError
from tiphys.protocol.step_spec import CheckpointPolicy


def compile_warns(cell: Cell) -> bool:
    """Whether compile refuses a step that declares such a grace period, and the upload as what a save takes."""
    asked = {
        "checkpoints": CheckpointPolicy(save_seconds=cell.upload_seconds),
        "grace_seconds": cell.grace_seconds,
    }
    try:
        compile_workflow(workflow(train(asked=asked)), CompileOptions(store=STORE))
    except UsageError as error:
        return "grace period" in str(error)
    return False
