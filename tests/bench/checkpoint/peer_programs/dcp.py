"""torch.distributed.checkpoint through fsspec and s3fs: ``python dcp.py MIB REPEATS sync|async``.

With four threads, a stager that keeps its memory from save to save, and without
fsync, which means nothing in a bucket (fsspec files have none, so DCP would sync
every disk of the machine).
"""

import sys

import torch
import torch.distributed.checkpoint as dcp
from protocol import BUCKET, Wait, arrays, is_over, report
from torch.distributed.checkpoint.fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

state = {name: torch.from_numpy(array) for name, array in arrays().items()}
is_asynchronous = sys.argv[3] == "async"
writer = FsspecWriter(f"s3://{BUCKET}/dcp/first", thread_count=4, sync_files=False)
stager = DefaultStager(
    StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
)


def save(number: int) -> Wait:
    where = f"s3://{BUCKET}/dcp/{number}"
    if is_asynchronous:
        begun = dcp.async_save(state, checkpoint_id=where, storage_writer=writer, async_stager=stager, no_dist=True)
        return begun.result
    dcp.save(state, checkpoint_id=where, storage_writer=writer, no_dist=True)
    return is_over


report(save)
