"""Environment variables that a compiled step gives its container."""

STORE = "TIPHYS_STORE"
RUN = "TIPHYS_RUN"
STEP = "TIPHYS_STEP"
ATTEMPT = "TIPHYS_ATTEMPT"
LINEAGE = "TIPHYS_LINEAGE"
RESUME_FROM = "TIPHYS_RESUME_FROM"
CHECKPOINT_STORE = "TIPHYS_CHECKPOINT_STORE"
SAVE_EVERY = "TIPHYS_SAVE_EVERY"
"""When to save: ``600s``, ``100 steps``, or ``auto:60s..3600s``, which follows what was measured."""

KEEP_LAST = "TIPHYS_KEEP_LAST"
"""How many checkpoints to keep: a number, or ``all``."""

KEEP_EVERY = "TIPHYS_KEEP_EVERY"
"""Anchors that stay for ever: ``1000 steps``; absent for none."""

KEEP_BEST = "TIPHYS_KEEP_BEST"
"""Best checkpoints that stay: ``loss:min:2``; absent for none."""

DELETE_AFTER_SECONDS = "TIPHYS_DELETE_AFTER_SECONDS"
"""How long a checkpoint that nothing keeps stays; absent for ten minutes."""

ASYNCHRONOUS = "TIPHYS_ASYNCHRONOUS"
"""Whether saves go on behind the training: ``true``, or ``false`` where memory has no room for a copy of the state."""

WHEN_BUSY = "TIPHYS_WHEN_BUSY"
"""What a save does that is due while another is under way: ``skip``, ``wait`` or ``queue``."""

METRICS = "TIPHYS_METRICS"
"""Where the metrics of the training loop can be seen: ``port:9464`` or ``textfile:/folder``; absent for none."""

CACHE = "TIPHYS_CACHE"
"""Folder that the processes of a node share, where shards of restored checkpoints are kept."""

BATCH_SCALE = "TIPHYS_BATCH_SCALE"
"""How much of its usual batch a program is advised to take, after a GPU was too small for it: 0.5; absent for all."""

HANG_AFTER_SECONDS = "TIPHYS_HANG_AFTER_SECONDS"
"""How long a training may complete no step before it is ended; absent for as long as it likes."""

GRACE_SECONDS = "TIPHYS_GRACE_SECONDS"
"""Whole seconds between SIGTERM and SIGKILL."""

IMAGE = "TIPHYS_IMAGE"
"""Image of the training container, as the author gave it."""

GIT_COMMIT = "TIPHYS_GIT_COMMIT"
"""Commit of the code that was compiled; ``-dirty`` behind it if files differed from it."""

FILES = "TIPHYS_FILES"
"""What one of several pods fetches and stores, in JSON: path of each input by its name, and of each output by its place
below the attempt's prefix."""

INPUT_KEYS = "TIPHYS_INPUT_KEYS"
"""Where the inputs lie in the store, in JSON: key by name."""

ELASTIC = "TIPHYS_ELASTIC"
"""Set where a training goes on with fewer nodes: the fewest and the most, ``2:4``."""

CHECKPOINT_URI = "CHECKPOINT_URI"

EX_TEMPFAIL = 75
"""Exit code of a program that saved after SIGTERM: try me again (sysexits.h)."""

EX_UNAVAILABLE = 69
"""Exit code of a program that found storage out of reach when it wanted to restore (sysexits.h)."""

EX_FENCED = 76
"""Exit code of a program that may no longer commit, because another attempt took its place."""

EX_HANG = 79
"""Exit code of a program that was ended because it completed no step any more; sysexits.h ends at 78."""


def output_path_variable(name: str) -> str:
    """Variable that holds the path of a declared output: ``val-loss`` → ``TIPHYS_OUTPUT_VAL_LOSS``."""
    return f"TIPHYS_OUTPUT_{name.replace('-', '_').upper()}"


def input_path_variable(name: str) -> str:
    """Variable that holds the path of a declared input artifact."""
    return f"TIPHYS_INPUT_{name.replace('-', '_').upper()}"
