"""``python -m hera_pipelines.cli`` is the ``tiphys`` command, for where no script is installed."""

import sys

from hera_pipelines.cli import main

sys.exit(main())
