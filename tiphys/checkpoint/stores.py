"""The stores of an attempt: that of its run, and that of its checkpoints."""

from tiphys.checkpoint.settings import Settings
from tiphys.store import Store, open_store


def open_stores(settings: Settings) -> tuple[Store, Store]:
    """The store of the run, and that of its checkpoints; raises as `open_store` does."""
    # A volume that is not mounted must not become a folder that dies with the pod.
    run_store = open_store(settings.store, must_exist=True)
    return run_store, open_store(settings.checkpoint_store, must_exist=True) if settings.has_volume else run_store
