"""Which store a command means, and why that one."""

import os
from pathlib import Path
from typing import Annotated

import typer

from hera_pipelines.cli.screen import Screen
from tiphys.protocol import environment
from tiphys.store import Store, open_store

DEFAULT_STORE = Path(".tiphys/store")
DEFAULT_STATE = Path(".tiphys/state")
_OPTION, _PIPELINE, _DEFAULT = "--store", "the pipeline", "the default"

_WHERE = "s3://bucket/prefix, file:///dir or a path. Otherwise the variable TIPHYS_STORE, otherwise "
_HERE = ".tiphys/store in the working directory."
StoreOption = Annotated[str | None, typer.Option(_OPTION, metavar="URL", help=f"{_WHERE}{_HERE}", show_default=False)]
WritingStoreOption = Annotated[
    str | None,
    typer.Option(
        _OPTION, metavar="URL", help=f"{_WHERE}what the pipeline names, otherwise {_HERE}", show_default=False
    ),
]


def existing_store(screen: Screen, given: str | None) -> Store:
    """The store to read; `NotFoundError` if there is none at that place."""
    return open_store(_choose(screen, given, ""), must_exist=True)


def store_for_writing(screen: Screen, given: str | None, pipeline: str = "") -> Store:
    """The store to write; a directory is made if it is missing. ``pipeline`` is what the file asks for."""
    return open_store(_choose(screen, given, pipeline))


def must_be_named(given: str | None, pipeline: str = "") -> bool:
    """Whether a later command finds this store only by ``--store``."""
    _, source = _chosen(given, pipeline)
    return source in (_OPTION, _PIPELINE)


def is_named(given: str | None, pipeline: str = "") -> bool:
    """Whether anything names a store, so that it is not a folder of this working directory."""
    _, source = _chosen(given, pipeline)
    return source != _DEFAULT


def _choose(screen: Screen, given: str | None, pipeline: str) -> str:
    url, source = _chosen(given, pipeline)
    screen.note(f"store {url} (from {source})")
    return url


def _chosen(given: str | None, pipeline: str) -> tuple[str, str]:
    """URL of the store, and what said so."""
    choices = (
        (given, _OPTION),
        (os.environ.get(environment.STORE), environment.STORE),
        (pipeline, _PIPELINE),
        (str(Path.cwd() / DEFAULT_STORE), _DEFAULT),
    )
    return next((url, source) for url, source in choices if url)
