"""Runs the ``tiphys`` command as ``python -m hera_pipelines.cli``, where the script is not installed."""

import sys

from hera_pipelines.cli import main

sys.exit(main())
