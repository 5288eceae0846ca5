"""One commit at a time, behind the program's back.

A look at the folder must not wait for an upload, nor a signal for storage that
does not answer, so bytes travel on a thread that never keeps us from ending.
"""

from collections.abc import Callable

from tiphys.checkpoint.exec.detect import Found, checkpoints_in
from tiphys.checkpoint.exec.files import ChangedMeanwhileError, look, shards_of
from tiphys.checkpoint.exec.options import Options
from tiphys.checkpoint.exec.store import Keeper
from tiphys.checkpoint.telemetry.events import tell
from tiphys.errors import FencedError, StoreError, TiphysError
from tiphys.threads import Background, in_background

_RETRY_SECONDS, _RETRY_MOST_SECONDS = 5.0, 120.0


class Saving:
    """The commit that is under way, and what became of the last one."""

    def __init__(self, keeper: Keeper, options: Options, clock: Callable[[], float]) -> None:
        self._keeper = keeper
        self._options = options
        self._clock = clock
        self._thread: Background | None = None
        self._wait_seconds = _RETRY_SECONDS
        self._not_before = clock()
        self.fenced: FencedError | None = None
        self.last_seconds = 0.0
        """How long the last commit took."""

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """Whether a commit can begin: none is under way, and storage was not out of reach just now."""
        return not self.busy and self._clock() >= self._not_before

    def start(self, found: Found, global_step: int, reason: str, settled: Callable[[Found], None]) -> None:
        """Commit ``found``; ``settled`` is called once it is of no more interest as it is."""
        self._thread = in_background(lambda: self._run(found, global_step, reason, settled))
        if self._thread is None:
            tell(f"no thread could be started to store {found.name or self._options.folder}; it is tried again")
            self._put_off()

    def _run(self, found: Found, global_step: int, reason: str, settled: Callable[[Found], None]) -> None:
        started = self._clock()
        try:
            shards = shards_of(self._options.folder, found.name, found.entries)
            self._keeper.commit(global_step, shards, reason, lambda: self._check_unchanged(found))
        except FencedError as error:
            self.fenced = error
        except ChangedMeanwhileError as error:
            tell(f"{error}; it is looked at again once it is whole")
        except StoreError as error:
            self._keeper.failed(global_step, error)
            self._put_off()
        except TiphysError as error:
            # Nothing but another content can help.
            self._keeper.failed(global_step, error)
            settled(found)
        else:
            self._wait_seconds = _RETRY_SECONDS
            self.last_seconds = self._clock() - started
            settled(found)

    def _put_off(self) -> None:
        self._not_before = self._clock() + self._wait_seconds
        self._wait_seconds = min(2 * self._wait_seconds, _RETRY_MOST_SECONDS)

    def _check_unchanged(self, found: Found) -> None:
        now = checkpoints_in(look(self._options.folder, self._options.ignored), self._options)
        if not any(one.name == found.name and one.entries == found.entries for one in now):
            raise ChangedMeanwhileError(f"{found.name or self._options.folder} was written to while it was stored")
