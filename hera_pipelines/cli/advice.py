"""``tiphys checkpoint advice``: what saving has cost a run, and how often it had better saved."""

from collections.abc import Iterator
from typing import Annotated

import typer
from tiphys_controller import API_VERSION

from hera_pipelines.cli.location import StoreOption, existing_store
from hera_pipelines.cli.pins import WhereArgument, find_lineage
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.draw.reading import size_text
from tiphys.checkpoint.advice import Advice, advise
from tiphys.checkpoint.settings import Bounds
from tiphys.errors import IntegrityError, NotFoundError, ObjectMissingError
from tiphys.lineage.choose import commits_of
from tiphys.lineage.verify import read_manifest
from tiphys.protocol.pipeline import CompiledPipeline
from tiphys.records import CheckpointManifest, CheckpointRef
from tiphys.store import Store, current_workflow, step_attempts
from tiphys.store.runs import concurrently

EXAMPLES = """\b
Examples:
  tiphys checkpoint advice digits-7xk2p
  tiphys checkpoint advice digits-7xk2p/fit -o json | jq .advised_seconds
"""


def advice(
    context: typer.Context,
    where: WhereArgument,
    store: StoreOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the output.")] = Format.TABLE,
) -> None:
    """Compare how often a training step saved with what would have lost the least time.

    From measured stalls and uploads and the recorded ends of attempts, by Daly's
    estimate. `Checkpoints(every="auto")` follows the same numbers while it trains.
    """
    screen: Screen = context.obj
    given = existing_store(screen, store)
    found = find_lineage(given, where)
    run = where.partition("/")[0]
    manifests = _manifests(found.store, found.name)
    if not manifests:
        raise NotFoundError(f"{found.name} has no checkpoint yet, so nothing was measured; ask again after a save")
    judged = advise(manifests, step_attempts(given, run, found.step), _bounds(given, run, found.step))
    if output == Format.TABLE:
        screen.table(("FACT", "VALUE"), _rows(judged))
        screen.note(_verdict(judged))
    else:
        document = {"apiVersion": API_VERSION, "kind": "CheckpointAdvice", "run": run, "step": found.step}
        screen.document({**document, **judged.model_dump(mode="json")}, output)


def _manifests(store: Store, lineage: str) -> list[CheckpointManifest]:
    def read(ref: CheckpointRef) -> CheckpointManifest | None:
        try:
            return read_manifest(store, ref)
        except (IntegrityError, ObjectMissingError):
            return None  # `tiphys verify` tells of these

    return [manifest for manifest in concurrently(read, commits_of(store, lineage)) if manifest]


def _bounds(store: Store, run: str, step: str) -> Bounds | None:
    """Those that the author set for ``auto``."""
    spec = CompiledPipeline.from_manifest(current_workflow(store, run)).steps.get(step.partition(".")[0])
    asked = spec.checkpoints.every_bounds if spec and spec.checkpoints else None
    return Bounds(*asked) if asked else None


def _rows(judged: Advice) -> Iterator[tuple[str, str]]:
    yield "saves", str(judged.saves)
    yield "stall", f"{judged.stall_seconds:.3f} s"
    yield "upload", f"{judged.upload_seconds:.1f} s"
    yield "size", size_text(judged.size_bytes)
    yield "bandwidth", f"{size_text(round(judged.bytes_per_second))}/s" if judged.bytes_per_second else "unknown"
    yield "failures", ", ".join(f"{cause} {count}" for cause, count in sorted(judged.failures.items())) or "none"
    yield "training", _time(judged.training_seconds)
    yield "between failures", f"{_time(judged.mtbf_seconds)} (expected)"
    yield "restart", _time(judged.restart_seconds)
    yield "used interval", _time(judged.used_seconds) if judged.used_seconds else "unknown"
    yield "advised interval", _time(judged.advised_seconds)
    for name, share in (("lost as used", judged.lost_share), ("lost as advised", judged.advised_lost_share)):
        yield name, "unknown" if share is None else f"{share:.1%}"


def _verdict(judged: Advice) -> str:
    best = _time(judged.advised_seconds)
    if judged.used_seconds is None:
        return f"a save every {best} would lose the least time"
    if abs(judged.used_seconds - judged.advised_seconds) <= 0.2 * judged.advised_seconds:
        return "the interval is as good as it gets"
    word = "rarer" if judged.used_seconds < judged.advised_seconds else "more frequent"
    return f"{word} saves would lose less time: Checkpoints(every='{round(judged.advised_seconds)}s'), or every='auto'"


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
