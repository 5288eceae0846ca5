"""Environment variables and exit codes of the containers of compiled steps.

Compiler and plugin set the variables, the training program reads them. The exit
codes of the training program tell the plugin how an attempt ended.
"""

STORE = "TIPHYS_STORE"
RUN = "TIPHYS_RUN"
STEP = "TIPHYS_STEP"
ATTEMPT = "TIPHYS_ATTEMPT"
LINEAGE = "TIPHYS_LINEAGE"
RESUME_FROM = "TIPHYS_RESUME_FROM"
CHECKPOINT_STORE = "TIPHYS_CHECKPOINT_STORE"
SAVE_EVERY = "TIPHYS_SAVE_EVERY"
"""Interval of saves: ``600s``, ``100 steps``, or ``auto:60s..3600s``, which adapts to measured costs."""

KEEP_LAST = "TIPHYS_KEEP_LAST"
"""How many checkpoints to keep: a number, or ``all``."""

KEEP_EVERY = "TIPHYS_KEEP_EVERY"
"""Interval of checkpoints that are never deleted: ``1000 steps``; absent for none."""

KEEP_BEST = "TIPHYS_KEEP_BEST"
"""Best checkpoints to keep: ``loss:min:2``; absent for none."""

DELETE_AFTER_SECONDS = "TIPHYS_DELETE_AFTER_SECONDS"
"""Delay before an expired checkpoint is deleted; absent for ten minutes."""

ASYNCHRONOUS = "TIPHYS_ASYNCHRONOUS"
"""Whether saves run in the background: ``true``, or ``false`` if memory has no room for a copy of the state."""

WHEN_BUSY = "TIPHYS_WHEN_BUSY"
"""Behaviour of a save that is due during another save: ``skip``, ``wait`` or ``queue``."""

METRICS = "TIPHYS_METRICS"
"""Where the training loop publishes its metrics: ``port:9464`` or ``port:127.0.0.1:9464``; absent for nowhere."""

CACHE = "TIPHYS_CACHE"
"""Cache folder for shards of checkpoints, shared by the processes of a node."""

NEAR_COPY = "TIPHYS_NEAR_COPY"
"""``false``: no copy of the newest checkpoint stays in the memory of the pod; absent where one may."""

NEAR_MEMORY = "TIPHYS_NEAR_MEMORY"
"""File in memory that the launcher holds for that copy; absent without a launcher."""

BATCH_SCALE = "TIPHYS_BATCH_SCALE"
"""Recommended fraction of the usual batch size after GPU out of memory, such as 0.5; absent for 1."""

HANG_AFTER_SECONDS = "TIPHYS_HANG_AFTER_SECONDS"
"""Seconds without a completed step after which a training is ended; absent for no limit."""

GRACE_SECONDS = "TIPHYS_GRACE_SECONDS"
"""Whole seconds between SIGTERM and SIGKILL."""

LAUNCHER = "TIPHYS_LAUNCHER"
"""File of the launcher to which each session of the program adds its process; absent without a launcher."""

RESTART_CAUSES = "TIPHYS_RESTART_CAUSES"
"""Causes of failures after which the launcher starts the program again in its pod: ``hang,infrastructure``; absent for
none."""

SPARE = "TIPHYS_SPARE"
"""``on`` or ``off``: whether a process with the program's imports waits for its end; absent: where memory has room."""

INCARNATION = "TIPHYS_INCARNATION"
"""Which process of its attempt a program is, from 2; absent for the first."""

RESTARTED_AFTER = "TIPHYS_RESTARTED_AFTER"
"""How the incarnation before ended: its cause, its exit code, and the time in seconds since 1970."""

IMAGE = "TIPHYS_IMAGE"
"""Image of the training container, as the author gave it."""

GIT_COMMIT = "TIPHYS_GIT_COMMIT"
"""Commit of the compiled code, with the suffix ``-dirty`` if files differed from it."""

OUTPUT_COPY = "TIPHYS_OUTPUT_COPY"
"""``off``: what the training program prints is not stored; otherwise it is, to be read once the pod is gone."""

FILES = "TIPHYS_FILES"
"""Files that a member of a gang fetches and stores, as JSON: path of each input by name, and path of each output by its
key below the attempt's prefix."""

DATA = "TIPHYS_DATA"
"""Versions of the data that the step reads and no step made, as a JSON list of `tiphys.records.DataVersion`."""

INPUT_KEYS = "TIPHYS_INPUT_KEYS"
"""Keys of the inputs in the store, as JSON: key by name."""

ELASTIC = "TIPHYS_ELASTIC"
"""Set for an elastic gang: the minimum and maximum number of nodes, ``2:4``."""

MEMBERS = "TIPHYS_MEMBERS"
"""How many members a gang was started with, whose programs are started again together; absent for a single pod."""

REGISTRATION = "TIPHYS_REGISTRATION"
"""The model that a step registers, as JSON (`tiphys.records.tracking.ModelRegistration`)."""

CHECKPOINT_URI = "CHECKPOINT_URI"

EX_TEMPFAIL = 75
"""Exit code of a program that saved after SIGTERM and requests another attempt (sysexits.h)."""

EX_UNAVAILABLE = 69
"""Exit code of a program that could not reach storage for its restore (sysexits.h)."""

EX_FENCED = 76
"""Exit code of a program that may no longer commit, because a newer attempt exists."""

EX_HANG = 79
"""Exit code of a program that the hang watchdog ended. Outside sysexits.h, which ends at 78."""

EX_NEW_POD = 80
"""Exit code of the launcher: a program that it started again failed before it had saved anything."""

TERMINATION_LOG = "/dev/termination-log"
"""Default file of a container's termination message (Kubernetes, ``terminationMessagePath``)."""

LOG_PREFIX = "tiphys: "
"""Begin of each line that Tiphys writes into the log of a program."""

RESTARTED = "process {} is started in this pod"
"""End of the line of the launcher between two processes of a program."""


def output_path_variable(name: str) -> str:
    """Name of the variable with the path of a declared output: ``val-loss`` → ``TIPHYS_OUTPUT_VAL_LOSS``."""
    return f"TIPHYS_OUTPUT_{name.replace('-', '_').upper()}"


def input_path_variable(name: str) -> str:
    """Name of the variable with the path of an input artifact: ``data`` → ``TIPHYS_INPUT_DATA``."""
    return f"TIPHYS_INPUT_{name.replace('-', '_').upper()}"
