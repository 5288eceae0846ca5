"""The ``tiphys`` command."""

from hera_pipelines.cli.app import main

__all__ = ["main"]
