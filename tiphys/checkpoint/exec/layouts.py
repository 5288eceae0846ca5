"""What libraries call their checkpoints, and which of their files they write last: knowledge as data.

A folder is read name by name, so one folder may hold the checkpoints of several
libraries. Only names that libraries are known to use count as a step, because
``rank_1.pt`` is no newer than ``rank_0.pt``.
"""

import fnmatch
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Layout:
    """How one library writes a checkpoint. The first layout that fits describes it.

    Attributes:
        name: Value of ``--layout``.
        title: Name of the library.
        names: What the names look like, for messages.
        holds: Patterns of files directly in the folder of a checkpoint; empty: its name has to fit.
        pattern: Regular expression of the name of a checkpoint.
        marker: Pattern of the file in the checkpoint's folder that the library writes last.
        pointer: File beside the checkpoints that names the newest one, without which the library begins at 0.
        copy: Pattern of a copy of the newest one, which the library writes after it and resumes from on request.
        is_renamed: The folder gets its name by a rename, once it is complete.
    """

    name: str
    title: str
    names: str
    holds: tuple[str, ...] = ()
    pattern: str = ""
    marker: str = ""
    pointer: str = ""
    copy: str = ""
    is_renamed: bool = False


LAYOUTS = (
    Layout("hf", "Hugging Face Trainer", "checkpoint-N/", holds=("trainer_state.json",), marker="trainer_state.json"),
    Layout("dcp", "torch.distributed.checkpoint", "folders with .metadata", holds=("*.distcp",), marker=".metadata"),
    Layout("dcp", "torch.distributed.checkpoint", "folders with .metadata", holds=(".metadata",), marker=".metadata"),
    # Since 0.5 by a rename; in buckets, and before, by the file commit_success.txt.
    Layout("orbax", "Orbax", "N/", holds=("commit_success.txt",), marker="commit_success.txt"),
    Layout("orbax", "Orbax", "N/", holds=("_CHECKPOINT_METADATA", "_METADATA"), is_renamed=True),
    Layout("deepspeed", "DeepSpeed", "global_stepN/", pattern=r"global_step\d+", pointer="latest"),
    Layout("megatron", "Megatron", "iter_N/", pattern=r"iter_\d{7}", pointer="latest_checkpointed_iteration.txt"),
    Layout(
        "tensorflow", "TensorFlow", "NAME-N.index", pattern=r".*-\d+\.(index|data-\d+-of-\d+)", pointer="checkpoint"
    ),
    Layout("detectron2", "detectron2", "model_N.pth", pattern=r"model_\d{7}\.pth", pointer="last_checkpoint"),
    Layout("lightning", "Lightning", "*.ckpt", pattern=r".*\.ckpt", copy="last*.ckpt"),
    Layout("keras", "Keras", "*.keras, *.weights.h5", pattern=r".*\.(keras|h5|hdf5)"),
    Layout("files", "numbered files", "names with a step, iteration or epoch", pattern=r".*\.\w+"),
    Layout("folders", "numbered folders", "names with a step, iteration or epoch", pattern=r".*"),
)
AUTO, WHOLE = "auto", "whole"
LAYOUT_NAMES = (AUTO, WHOLE, *dict.fromkeys(layout.name for layout in LAYOUTS))

TEMPORARY_PATTERNS = (
    "*.tmp",
    "*.tmp[-_.0-9]*",
    "*.orbax-checkpoint-tmp*",
    "tmp-checkpoint-*",
    "*.tempstate*",
    "*.incomplete",
    "*.part",
    "*.partial",
    ".nfs*",
    "lost+found",
)
"""Names that are gone once the checkpoint is complete, and that are never part of one."""

_LOG_PATTERNS = (
    *("*.log", "*.log.*", "*log.txt", "log[-_.]*.txt", "logs.txt", "std???.txt", "*.out", "*.err"),
    *("*.csv", "*.tsv", "*.jsonl", "events.out.tfevents.*", "*.wandb"),
    *("*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.pdf", "*.html"),
)
_CODE = re.compile(r".*\.(py|ipynb|sh|md|patch|diff)", re.I)
_SETTINGS = re.compile(
    r".*\.(ya?ml|toml|ini|cfg|conf|lock)|(.*[._-])?(config\w*|settings|options|args|arguments|hparams|hyper_?param\w*"
    r"|params|tokenizer|vocab\w*|merges|tokens_map|added_tokens|metadata|info|labels|classes|requirements)"
    r"\.(json|txt|pkl|bin)",
    re.I,
)
_STEP_LABELS = r"(?:global|time)?_?steps?|updates?"
_OTHER_LABELS = (
    r"iter(?:ation)?s?|epochs?|ep|episodes?|generations?|ckpt|chkpt|checkpoints?|snapshot|round|model|weights|network"
)
_LABELLED = [
    re.compile(rf"(?<![a-z])(?:{labels})[-_=. ]*(\d[\d._-]*)", re.I) for labels in (_STEP_LABELS, _OTHER_LABELS)
]
_SUFFIXED = re.compile(r"(?<!\d)(\d+)[-_]?(?:steps?|timesteps?|iters?|iterations?|updates?|epochs?)(?![a-z])", re.I)
_LEADING_EPOCH = re.compile(r"(\d+)[-_.].*\.(?:keras|h5|hdf5)")  # Keras: {epoch:02d}-{val_loss:.2f}.keras
_DATE = re.compile(r"(?:19|20)\d{6}")
_LAST_NUMBER = re.compile(r"(?<![\d.])\d+(?!\.?\d)")
_OF_MANY = re.compile(r"(?<!\d)\d+-of-\d+")
_POINTER_NAME = re.compile(r"latest|last|newest|current|best|resume|checkpoint$|ckpt$", re.I)
_FIELD = re.compile(r'"(?:global_step|step|iteration|epoch)"\s*:\s*(\d+)')
_TEXT_FIELD = re.compile(r'^\s*\{[^{}]*?:\s*"([^"]+)"')
POINTER_BYTES = 4096
"""Largest file that is read as a pointer."""


def base_name(path: str) -> str:
    """Return the last name of a path in a folder."""
    return path.rpartition("/")[2]


@lru_cache(maxsize=1 << 16)
def is_log(name: str) -> bool:
    """Return whether a file of this name only grows, so that its beginning is as good as the whole, or is a picture."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _LOG_PATTERNS)


def may_be_state(name: str, *, is_rewritten: bool) -> bool:
    """Return whether a file of this name may be what a training resumes from, though nothing else lies there.

    Settings are written once, before the first step. What is written again and again is a state, whatever its name.
    """
    return not (is_log(name) or _CODE.fullmatch(name) or (_SETTINGS.fullmatch(name) and not is_rewritten))


@lru_cache(maxsize=1 << 16)
def find_step(name: str) -> int | None:
    """Return the step, iteration or epoch that libraries mean by this name; None if it holds none."""
    if _OF_MANY.search(name) and not re.search(r"\.data-\d+-of-\d+$", name):
        return None
    for pattern in _LABELLED:
        for match in reversed(list(pattern.finditer(name))):
            numbers = [part for part in re.split("[-_]", match[1].strip("._-")) if part.isdecimal()]
            if 1 <= len(numbers) <= 2 and not _DATE.fullmatch(numbers[0]):
                return int(numbers[-1])
    other = _SUFFIXED.search(name) or _LEADING_EPOCH.fullmatch(name)
    return int(other[1]) if other else None


def find_last_number(name: str) -> int | None:
    """Return the last whole number of a name; None if it holds none."""
    numbers = _LAST_NUMBER.findall(name.removesuffix(".h5").removesuffix(".hdf5"))
    return int(numbers[-1]) if numbers else None


def may_be_pointer(name: str) -> bool:
    """Return whether a small file or link of this name may name a checkpoint, as ``latest`` does."""
    return _POINTER_NAME.search(name) is not None


def is_best(name: str) -> bool:
    """Return whether a pointer names the best checkpoint, which need not be the newest."""
    return "best" in name.lower()


def describe_copy(modified_ns: Mapping[str, int]) -> str:
    """Return what is wrong with the copy of the newest checkpoint from which a program may resume; empty if nothing.

    ``modified_ns`` are the times of the restored files by path.
    """
    files = [(at, base_name(path)) for path, at in modified_ns.items()]
    layouts = {layout for _, name in files if (layout := fit_layout(name, None, AUTO)) and layout.copy}
    for layout in layouts:
        copies = [file for file in files if fnmatch.fnmatch(file[1], layout.copy)]
        steps = [file for file in files if file not in copies and fit_layout(file[1], None, AUTO) is layout]
        remedy = f"let it resume from the newest of {layout.names}"
        if not copies:
            return (
                f"the restored checkpoint has no {layout.copy}: a program that resumes from that file begins from the "
                f"beginning; {remedy}"
            )
        if steps and max(steps)[0] > max(copies)[0]:
            step, copy = max(steps)[1], max(copies)[1]
            return (
                f"the program ended after it had written {step}, and before it wrote {copy} again: the steps between "
                f"are lost to a program that resumes from the latter; {remedy}"
            )
    return ""


def read_pointer(text: str) -> str:
    """Return the path of the checkpoint, or the number, in a pointer's text; empty if it holds none."""
    if field := _FIELD.search(text) or _TEXT_FIELD.match(text):
        return field[1].rstrip("/")
    line = text.strip().partition("\n")[0]
    return re.split(r"[:=]\s", line)[-1].strip().strip("\"',; ").rstrip("/")


@lru_cache(maxsize=1 << 16)
def fit_layout(name: str, children: Collection[str] | None, wanted: str) -> Layout | None:
    """Return the layout of an entry; None if it is no checkpoint of the wanted layout.

    Args:
        name: Name of the entry.
        children: Names directly in it; None: it is a file.
        wanted: A name of `LAYOUT_NAMES`.
    """
    for layout in LAYOUTS:
        if wanted not in (AUTO, layout.name) or layout.name == ("folders" if children is None else "files"):
            continue
        if layout.holds and not any(fnmatch.filter(children or (), pattern) for pattern in layout.holds):
            continue
        if layout.pattern and not re.fullmatch(layout.pattern, name):
            continue
        return layout
    return None
