"""The promises that are tried, and how a trial of one ends: it held, it is broken, or it was not tried, and why."""

import time
from collections.abc import Callable, Mapping, Sequence

from tiphys_controller.doctor.check import CheckStatus, Finding, failed
from tiphys_controller.doctor.store_probe import ProbeCheck

from hera_pipelines.demo.processes import PromiseBrokenError
from tiphys.errors import ConflictError, IntegrityError, NotFoundError, TiphysError

PROMISES: Mapping[str, str] = {
    "create-only": "An object that exists is never overwritten.",
    "create-only-parts": "Nor is it by an upload in parts.",
    "race": "Of writers that race for one key one wins, and its bytes stay.",
    "read-after-write": "Reads and listings show a write or a deletion at once.",
    "listing": "Listings are complete and in order, over several pages.",
    "checksum": "The server refuses bytes that were damaged on the way.",
    "flat-namespace": "Folders are no objects.",
    "clock": "The clocks of this machine and of the store agree.",
    "claims": "Of processes that claim the same one wins, also if replies are lost, and all others see it at once.",
    "fence": "An attempt that was replaced commits nothing more, and none of its late checkpoints is chosen.",
    "pins": "Retention deletes no pinned checkpoint, also if the pin comes while it deletes, and never the newest.",
    "killed-commit": "A program may be killed in any part of a commit: it goes on, and ends with the same bits.",
    "damage": "A damaged checkpoint is noticed, and the one before it is taken.",
    "submission": "A request that is sent twice at once makes one Workflow.",
    "deleted-pod": "A training whose pod is deleted goes on, with the same bits; no finished step runs again.",
    "quota": "A request beyond what its queue may hold gets no pod, and no queue holds more than it may.",
}
ON_CLUSTER = ("submission", "deleted-pod", "quota")
_ANSWERS = (NotFoundError, ConflictError, IntegrityError)
"""Of a store about its objects, which its trials expect to be otherwise."""
_REMEDY = "start no runs that matter on it, and send this report, which has the seed, to those who run it"


class UntriedError(TiphysError):
    """Something is missing that a trial needs. ``remedy`` says how to have it."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


def try_promises(
    trials: Sequence[ProbeCheck], findings: list[Finding], deadline: float, note: Callable[[str], object]
) -> None:
    """Try promises one after the other, and add what is found to ``findings``.

    A trial that gets no answer has broken nothing: its promise was not tried. Nothing more is tried once the monotonic
    clock is past ``deadline``, or after an interrupt, which is raised again.
    """
    for index, (promise, trial) in enumerate(trials):
        try:
            if time.monotonic() > deadline:
                raise UntriedError("the time was over before its turn", "give it more with --minutes")
            note(f"{promise}: {PROMISES[promise]}")
            found = trial()
        except KeyboardInterrupt:
            rest = [name for name, _ in trials[index:]]
            findings += [Finding(name, CheckStatus.UNKNOWN, "interrupted", "run the command again") for name in rest]
            raise
        except TiphysError as error:
            is_answer = isinstance(error, _ANSWERS) and promise not in ON_CLUSTER
            if is_answer or isinstance(error, PromiseBrokenError):
                found = failed(str(error), _REMEDY)
            else:
                found = Finding("", CheckStatus.UNKNOWN, str(error), getattr(error, "remedy", ""))
        findings.append(found._replace(check=promise))
