"""The program of a warm spare: imports what the program imports, waits, and becomes the program.

Runs in the program's own interpreter, which may lack Tiphys, so it needs the standard library alone. It makes no call
of CUDA and imports no module of the author. `tiphys.launch.spare` starts it, and speaks with it over two pipes: the
names of modules come in, a byte says that they are imported; the variables of the program come in, a byte says that
the program begins.
"""

import contextlib
import os
import sys

END = b"\0\0"
"""End of a list of texts, which hold no NUL."""
STREAMS = (1, 2)


def read_texts(descriptor: int) -> list[str]:
    """Read texts up to `END`; the process ends if its launcher does."""
    data = b""
    while not data.endswith(END):
        part = os.read(descriptor, 1 << 16)
        if not part:
            sys.exit(0)
        data += part
    return [os.fsdecode(text) for text in data.removesuffix(END).split(b"\0") if text]


def import_modules(names: list[str]) -> None:
    """Import what can be imported, without a word: the program says itself what is missing.

    The streams stay what they are, because loggers that imports make keep them; their descriptors lead nowhere.
    """
    kept = [os.dup(number) for number in STREAMS]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in STREAMS:
        os.dup2(nowhere, number)
    try:
        for name in names:
            if name not in sys.modules:
                with contextlib.suppress(Exception, SystemExit):
                    __import__(name)
    finally:
        for number, copy, stream in zip(STREAMS, kept, (sys.stdout, sys.stderr), strict=True):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)


def run(kind: str, target: str) -> None:
    """Run a script, a module or code as ``python`` does: in the module ``__main__``."""
    import importlib.machinery as loaders  # the launcher imports this module for `END` alone
    import runpy

    main, path = sys.modules["__main__"].__dict__, os.path.abspath(target)
    run_module = runpy._run_module_as_main  # type: ignore[attr-defined]  # what python -m calls
    for known in [known for known in main if known not in ("__name__", "__builtins__")]:
        del main[known]  # this module is the program from now on
    main["__annotations__"] = {}
    if kind == "-m":
        run_module(target)
        return
    source: str | bytes = target
    given: dict[str, object] = {"__doc__": None, "__package__": None, "__spec__": None}
    given["__loader__"] = loaders.BuiltinImporter
    name = "<string>"
    if kind == "script":
        name = path
        with open(name, "rb") as file:
            source = file.read()
        given |= {"__file__": name, "__cached__": None}
        given["__loader__"] = loaders.SourceFileLoader("__main__", name)
    main.update(given)
    exec(compile(source, name, "exec", dont_inherit=True), main)  # noqa: S102  it is the program


def begin(arguments: list[str]) -> None:
    """``COMMANDS ANSWERS -- KIND TARGET ARGUMENTS…``: numbers of the pipes, and what to run."""
    commands, answers = int(arguments[0]), int(arguments[1])
    kind, target, *rest = arguments[3:]
    sys.argv = [target if kind == "script" else kind, *rest]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(target)) if kind == "script" else ""
        if kind == "-m":
            sys.path[0] = os.getcwd()
    import_modules(read_texts(commands))
    os.write(answers, b"r")
    for name, sign, value in (text.partition("=") for text in read_texts(commands)):
        if sign:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    os.write(answers, b"b")
    os.close(commands)
    os.close(answers)
    run(kind, target)


if __name__ == "__main__":
    begin(sys.argv[1:])
