"""Notices a DataLoader of PyTorch whose position no checkpoint holds: its epoch begins again after a restore.

Nothing else would say so. The program resumes with the right weights, and trains on some samples twice and on others
never.
"""

import gc
import os
import sys
from typing import Any

from tiphys.checkpoint.telemetry.events import log_once


def warn_of_lost_position() -> None:
    """Say in the first rank what a restore does to the epoch that is under way, if anything.

    A loader of torchdata, and one whose data set or sampler has ``state_dict()``, is taken to be part of the state.
    """
    module: Any = sys.modules.get("torch.utils.data.dataloader")
    base = getattr(module, "_BaseDataLoaderIter", None)
    if base is None or os.environ.get("RANK", "0") != "0":
        return
    # Only a loop holds such an iterator. Its type is looked at, because some objects answer isinstance by an import.
    order = None
    for iterator in [candidate for candidate in gc.get_objects() if issubclass(type(candidate), base)]:
        index = getattr(iterator, "_index_sampler", None)
        sampler = getattr(index, "sampler", None)
        if any(
            hasattr(type(part), "state_dict")
            for part in (iterator, getattr(iterator, "_dataset", None), index, sampler)
        ):
            return  # another one, such as of an evaluation, may stand anywhere
        if 0 < getattr(iterator, "_num_yielded", 0) < _batches(iterator):
            order = order or (", in another order" if isinstance(sampler, module.RandomSampler) else "")
    if order is not None:
        log_once(
            "the position in the data is not part of the state: after a restore the epoch of the DataLoader begins "
            f"again{order}; use torchdata's StatefulDataLoader, as sampler= of capture() and load() where you call "
            "them, or skip the batches that were consumed, and pass step() their number as data_position="
        )


def _batches(iterator: Any) -> float:
    try:
        return len(iterator)
    except (TypeError, NotImplementedError):  # data without a known end
        return float("inf")
