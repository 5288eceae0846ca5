"""What a step uses of its author's files travels: each program runs in a bare Python, in an empty folder.

| in the files | what becomes of it |
|---|---|
| imports, constants, helpers, classes that the function uses, and what these use | travels |
| a statement that changes one of these, such as `random.seed(0)`, `TABLE["a"] = f`, `@register` | travels |
| modules of the author's project, as far as they are used | travel under their names |
| other statements, type hints, `if TYPE_CHECKING`, `if __name__ == "__main__"` | stay behind |
| `__file__`, what is read from a file at import, names of Hera, of a function around it | refused, with the line |
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from hera_pipelines.authoring.functions.written_code import MAX_SCRIPT_BYTES
from hera_pipelines.authoring.loading import load_pipeline
from hera_pipelines.local.arguments import replace_tags
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest, program_source

HEAD = """
from pathlib import Path
from typing import Annotated
from hera.workflows import Artifact, Parameter
from hera_pipelines import Pipeline, plain, step, train

Text = Annotated[str, Parameter(name="text")]
"""
TAIL = """
with Pipeline("digits") as pipeline:
    fit()
"""


def compile_files(folder: Path, files: Mapping[str, str], main: str = "pipeline.py") -> dict[str, Manifest]:
    """The templates of a project in ``folder``, by name."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(dedent(text))
    before = dict(sys.modules)
    try:
        compiled = load_pipeline(folder / main).compile(store="s3://bucket/runs")
    finally:
        for module in sys.modules.keys() - before.keys():
            if str(folder) in str(getattr(sys.modules[module], "__spec__", None)):
                del sys.modules[module]
    return {template["name"]: template for template in compiled["spec"]["templates"]}


def script_of(folder: Path, files: Mapping[str, str], main: str = "pipeline.py", step: str = "fit") -> str:
    templates = compile_files(folder, files, main)
    template = templates.get(f"{step}-run") or templates[step]
    return str(template["script"]["source"])


def run_script(
    script: str, folder: Path, parameters: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run ``script`` by the Python under the one of the tests, which has no packages."""
    folder.mkdir(exist_ok=True)
    values = {f"inputs.parameters.{name}": value for name, value in (parameters or {}).items()}
    (folder / "script").write_text(replace_tags(script, values))
    environ = {"TIPHYS_OUTPUT_TEXT": "text", "PATH": os.environ["PATH"]}
    python = getattr(sys, "_base_executable", sys.executable)
    return subprocess.run(
        [python, "-E", "-s", "script"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def result_of(folder: Path, files: Mapping[str, str], main: str = "pipeline.py", **parameters: str) -> str:
    """The output ``text`` of the step ``fit`` of a project."""
    done = run_script(script_of(folder / "project", files, main), folder / "container", parameters)
    assert done.returncode == 0, done.stderr
    return (folder / "container" / "text").read_text()


def single(body: str) -> dict[str, str]:
    """A project of one file with a step ``fit``."""
    return {"pipeline.py": HEAD + dedent(body) + TAIL}


RESEARCH = (
    '''
"""Trains on digits; ü and {{ are just text."""

import functools
import json as _json
import logging, os.path
import random
from collections import OrderedDict as Ordered, defaultdict
from typing import TYPE_CHECKING

try:
    import torch
except ImportError:
    torch = None
if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)
random.seed(7)
print("imported")

CLASSES = 10
WIDTH = CLASSES * 2; DEPTH = 3
if DEPTH > 2:
    KIND = "deep"
else:
    KIND = "flat"
for SQUARE in range(4):
    pass
TEMPLATE = "{{ name }} {{{" """ '''
    + "'''"
    + r''' \n"""
MODELS = {}
CONFIG = {"lr": 0.1}
CONFIG["lr"] = 0.5
CONFIG.update(decay=0.9)
calls = 0
UNUSED = open("not there") if False else pd_missing if False else 1


def register(name):
    def add(function):
        MODELS[name] = function
        return function
    return add


@register("linear")
def linear(x: "pd.DataFrame") -> float:
    return weight(x) + 0.5


@functools.lru_cache(maxsize=None)
def weight(x: float) -> float:
    global calls
    calls += 1
    return x * CONFIG["lr"]


@step()
def scale(value: float, by: float = 2.0) -> Annotated[float, Parameter(name="scaled")]:
    return value * by


@step()
def fit(rows: int = CLASSES) -> Text:
    counts = defaultdict(int)
    counts["a"] += even(6)
    weight(1); weight(1)
    return _json.dumps(
        [scale(2.0), MODELS["linear"](2.0), WIDTH, KIND, SQUARE, torch is None, even(7), calls, random.random(),
         logger.name, Ordered(a=1), CONFIG, TEMPLATE, os.path.sep, f"{{{KIND}}}", "ü 漢"]
    )


def even(n: int) -> bool:
    return True if n == 0 else odd(n - 1)


def odd(n):
    return False if n == 0 else even(n - 1)
'''
)


def test_a_research_script_travels_with_what_it_uses(tmp_path: Path) -> None:
    import json
    import random

    text = result_of(tmp_path, {"pipeline.py": HEAD + RESEARCH + TAIL}, rows="3")

    assert json.loads(text) == [
        *(4.0, 1.5, 20, "deep", 3, True, False, 2, random.Random(7).random()),
        *("__main__", {"a": 1}, {"lr": 0.5, "decay": 0.9}, "{{ name }} {{{ ''' \n", "/", "{deep}", "ü 漢"),
    ]
    script = script_of(tmp_path / "project", {"pipeline.py": HEAD + RESEARCH + TAIL})
    assert script.count("{{") == 1
    assert not any(word in script for word in ("hera", "UNUSED", "pandas", "imported", "@step", "Pipeline"))


PACKAGE = {
    "pyproject.toml": "",
    "lab/__init__.py": "from hera_pipelines import step\nimport lab.settings\nNAME = 'lab'\n",
    "lab/settings.py": "RATE = 3\nUNUSED = open\n",
    "lab/models/__init__.py": "from .net import Net\nfrom .other import absent\n",
    "lab/models/net.py": """
        from __future__ import annotations
        import dataclasses
        from typing import TYPE_CHECKING
        from ..settings import RATE
        from hera_pipelines import train
        if TYPE_CHECKING:
            from pandas import DataFrame

        @dataclasses.dataclass
        class Net:
            width: int = RATE
            data: DataFrame | None = None

            def size(self) -> DataFrame:
                from lab.tools import double
                return double(self.width)

        @train(image="x:1")
        def fit_net(): ...
        """,
    "lab/models/other.py": "import hera_pipelines as absent\n",
    "lab/tools.py": """
        __all__ = ["double", "half"]
        from lab import helpers as h

        def double(x): return h.times(x, 2)
        def half(x): return x / 2
        """,
    "lab/helpers.py": "import json\nfrom hera_pipelines import step\ndef times(x, y): return json.loads(str(x * y))\n",
    "lab/stars.py": "from lab.tools import *\nfrom math import *\n_own = 1\ndef shout(text): return text.upper()\n",
    "lab/pipelines/__init__.py": "",
    "lab/pipelines/digits.py": HEAD
    + """
import lab.settings
import lab.tools as tools
from lab.models import Net
from ..stars import *
from . import sibling

@step()
def fit() -> Text:
    from lab.models.net import Net as Same
    return repr([Net(4).size(), Same is Net, tools.half(2), lab.settings.RATE, shout("a"), half(4), floor(1.5),
                 sibling.WORD, Net.__module__])
"""
    + TAIL,
    "lab/pipelines/sibling.py": "WORD = 'w'\nfrom hera_pipelines import step\n",
}


def test_modules_of_the_project_travel_as_far_as_they_are_used(tmp_path: Path) -> None:
    text = result_of(tmp_path, PACKAGE, main="lab/pipelines/digits.py")

    assert text == repr([8, True, 1.0, 3, "A", 2.0, 1, "w", "lab.models.net"])


def test_a_module_beside_the_file_travels(tmp_path: Path) -> None:
    files = {
        "helpers.py": "import tools\ndef clean(text): return tools.strip(text)\ndef other(): return missing\n",
        "tools.py": "def strip(text):\n    return text.strip()\n",
        "pipeline.py": HEAD
        + "from helpers import clean\n\n@step()\ndef fit() -> Text:\n    return clean(' a ')\n"
        + TAIL,
    }

    assert result_of(tmp_path, files) == "a"


NOTEBOOK = """
import multiprocessing
import pickle
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import NamedTuple

class Kind(Enum):
    SGD = "sgd"

class Point(NamedTuple):
    x: int = 1

@dataclass
class Base:
    kind: Kind = Kind.SGD

@dataclass(frozen=True, order=True)
class Config(Base if False else object):
    lr: float = 0.1
    points: list = field(default_factory=lambda: [Point()])

DEFAULT = Config(lr=0.2)
LABELS = [kind.value for kind in Kind]

def square(config):
    return Config(config.lr * 2)

@step()
def fit() -> Text:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        [made] = pool.map(square, [DEFAULT])
    assert pickle.loads(pickle.dumps(Base())) == Base()
    return repr((made, LABELS, [each.type for each in fields(Config)][0]))
"""


def test_classes_travel_to_processes_that_are_spawned(tmp_path: Path) -> None:
    text = result_of(tmp_path, {"pipeline.py": HEAD + NOTEBOOK + TAIL})

    assert text == "(Config(lr=0.4, points=[Point(x=1)]), ['sgd'], <class 'float'>)"


def test_local_modules_reach_processes_that_are_spawned(tmp_path: Path) -> None:
    files = {
        "work.py": "class Item:\n    def __init__(self, n): self.n = n\n\ndef twice(item): return Item(item.n * 2)\n"
        + "".join(f"def unused_{n}(): return {n!r}\n" for n in range(300)),
        **single("""
            import multiprocessing
            import work

            @step()
            def fit() -> Text:
                assert work
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    return str(pool.map(work.twice, [work.Item(2)])[0].n)
            """),
    }

    assert result_of(tmp_path, files) == "4"
    assert "_AuthorModules.unpack(" in script_of(tmp_path / "project", files)


SMALL = {
    "loops, blocks and calls that change a table": (
        """
        from contextlib import suppress
        TABLE = {}
        for name in ("a", "b"):
            TABLE[name] = name.upper()
        if len(TABLE) == 2:
            TABLE["c"] = 1
        A, *B = 1, 2, 3
        with suppress(KeyError):
            VALUE = 5
            TABLE["zz"]
        try:
            import not_installed
        except ImportError:
            HAVE = False
        def setup():
            TABLE["setup"] = 1
        setup()
        """,
        "repr((TABLE, A, B, VALUE, HAVE))",
        repr(({"a": "A", "b": "B", "c": 1, "setup": 1}, 1, [2, 3], 5, False)),
    ),
    "a global that a function sets": (
        """
        def load():
            global MODEL
            MODEL = "m"
        load()
        """,
        "MODEL",
        "m",
    ),
    "a name that type checkers see otherwise": (
        """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            import pandas as frame
        else:
            frame = "x"
        """,
        "frame",
        "x",
    ),
    "a function of several types": (
        """
        import functools
        @functools.singledispatch
        def kind(x): return "any"
        @kind.register
        def _(x: int): return "int"
        """,
        "kind(1) + kind('a')",
        "intany",
    ),
    "a data class that names itself": (
        """
        from dataclasses import dataclass
        @dataclass
        class Node:
            parent: "Node" = None
        """,
        "repr(Node())",
        "Node(parent=None)",
    ),
    "a name that is defined twice": ("def f(): return 1\nold = f\ndef f(): return old() + 1\n", "str(f())", "2"),
    "what is replaced in another module": ("import os\nos.sep = '|'\n", "os.sep", "|"),
    "star imports of packages": ("from math import *\nfrom os.path import *\n", "join('a', str(floor(pi)))", "a/3"),
    "the text of a function": (
        "import inspect\ndef f():\n    # why\n    return 1\n",
        "inspect.getsource(f)",
        "def f():\n    # why\n    return 1\n",
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_statements_that_give_or_change_a_name_travel(name: str, tmp_path: Path) -> None:
    above, value, result = SMALL[name]
    body = f"{dedent(above)}\n@step()\ndef fit() -> Text:\n    return {value}\n"

    assert result_of(tmp_path, {"pipeline.py": HEAD + body + TAIL}) == result


LIBRARY = {
    "a folder without __init__": ({"lib/sub.py": "x = '1'\n"}, "from lib.sub import x", "x", "1"),
    "a module that makes its names": ({"h.py": "X = 'x'\ndef __getattr__(n): return X\n"}, "import h", "h.any", "x"),
    "a module as a value": ({"h.py": "X = 1\nY = 2\n"}, "import h", "str(len([n for n in vars(h) if n in 'XY']))", "2"),
    "modules that import each other": (
        {
            "a.py": "import b\ndef f(n): return b.g(n)\n",
            "b.py": "import a\ndef g(n): return a.f(n - 1) if n else 'end'\n",
        },
        *("import a", "a.f(3)", "end"),
    ),
    "braces": ({"h.py": "T = '{{x}} ' + f'{{{1}}}'\n"}, "import h", "h.T", "{{x}} {1}"),
    "a step of another file": (
        {
            "other.py": "from hera_pipelines import train\nfrom hera.workflows import Parameter\n"
            "from typing import Annotated\nO = Annotated[str, Parameter(name='o')]\ngpu = train(image='x:1')\n"
            "@gpu\ndef prepare(n: int, by: int = 2) -> O:\n    return str(n * by)\n"
        },
        *("from other import prepare", "prepare(4)", "8"),
    ),
    "a module that imports the file": (
        {"a.py": "def f():\n    from pipeline import C\n    return C\n"},
        *("import a\nC = '7'", "a.f()", "7"),
    ),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_local_modules_of_every_kind_travel(name: str, tmp_path: Path) -> None:
    files, above, value, result = LIBRARY[name]
    body = f"{above}\n@step()\ndef fit() -> Text:\n    return {value}\n"

    assert result_of(tmp_path, {**files, "pipeline.py": HEAD + body + TAIL}) == result


def test_names_that_the_script_uses_itself_are_the_authors(tmp_path: Path) -> None:
    files = single("""
        json = 1
        sys = ast = linecache = zlib = "mine"

        def _read(name): return name
        def _keep(*names): return [_read(json), sys, ast, os(1), *names]
        def os(n): return pathlib + n
        pathlib = 2

        @step()
        def result(n: int = 1) -> Text:
            return str(_keep(n))

        @step()
        def fit() -> Text:
            return result(3)
        """)

    assert result_of(tmp_path, files) == "[1, 'mine', 'mine', 3, 3]"


def test_decorators_under_ours_travel(tmp_path: Path) -> None:
    files = single("""
        import functools

        def loud(by):
            def decorate(function):
                @functools.wraps(function)
                def call(*args, **kwargs):
                    return function(*args, **kwargs) * by
                return call
            return decorate

        cheap = step(cache=False)

        @cheap
        @loud(2)
        @loud(by=3)
        def fit(n: "Text" = "a" if False else 1) -> Text:
            return "x"
        """).copy()
    files["pipeline.py"] = files["pipeline.py"].replace('n: "Text"', "n: int")

    script = script_of(tmp_path / "project", files)
    done = run_script(script, tmp_path / "container", {"n": "1"})

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "container" / "text").read_text() == "xxxxxx"


REFUSED = [
    ("CONFIG = Path(__file__).parent", "return CONFIG", 8, "uses __file__"),
    ("CONFIG = open('x.yaml').read() if False else 1", "return CONFIG", 8, "uses what is read from a file when"),
    ("CONFIG = [lambda: 1, [Path('x').read_text() for _ in ()]]", "return CONFIG", 8, "uses what is read from a file"),
    ("", "return Parameter", 4, "uses 'Parameter' of hera.workflows, which the image of a step need not have"),
    ("", "return pipeline", 5, "uses 'Pipeline' of hera_pipelines, which the image"),
    ("", "return missing", 12, "uses 'missing', which its file does not define at its top level"),
    ("if __name__ == '__main__':\n    ARGS = 1", "return ARGS", 13, "uses 'ARGS', which its file does not define"),
]


@pytest.mark.parametrize(("above", "body", "line", "message"), REFUSED)
def test_a_function_that_cannot_travel_is_refused_with_its_line(
    above: str, body: str, line: int, message: str, tmp_path: Path
) -> None:
    text = HEAD + above + "\n\n@step()\ndef fit() -> Text:\n    " + body + "\n" + TAIL
    (tmp_path / "pipeline.py").write_text(text)

    with pytest.raises(UsageError, match=f"pipeline.py:[0-9]+: step 'fit', line {line}: the function {message}"):
        load_pipeline(tmp_path / "pipeline.py")


def test_a_local_module_that_cannot_travel_is_refused_with_its_line(tmp_path: Path) -> None:
    files = {
        "helpers.py": "import os\n\nHERE = os.path.dirname(__file__)\ndef clean(): return HERE\n",
        **single("import helpers\n@step()\ndef fit() -> Text:\n    return helpers.clean()\n"),
    }

    with pytest.raises(
        UsageError, match=r"step 'fit', helpers\.py:3: the module uses __file__.*install the module as a"
    ):
        compile_files(tmp_path, files)


def test_a_script_that_is_too_long_is_refused_with_its_files(tmp_path: Path) -> None:
    import random

    noise = random.Random(1)
    rows = "\n".join(f"    {noise.random()!r}," for _ in range(10_000))
    files = {
        "table.py": f"ROWS = [\n{rows}\n]\n",
        **single("from table import ROWS\n@step()\ndef fit() -> Text:\n    return str(len(ROWS))\n"),
    }

    with pytest.raises(
        UsageError, match=rf"bytes with table\.py, pipeline\.py, and a step can have {MAX_SCRIPT_BYTES:,}"
    ):
        compile_files(tmp_path, files)


FAILING = """
def helper(x):
    # why
    return [
        1,
        x / 0,
    ]


@step()
def fit() -> Text:
    return helper(
        1
    )
"""


def test_a_traceback_names_the_authors_file_and_lines_alone(tmp_path: Path) -> None:
    done = run_script(script_of(tmp_path / "project", single(FAILING)), tmp_path / "container")

    lines = [line for line in done.stderr.splitlines() if "^" not in line and "~" not in line]
    assert lines == [
        "Traceback (most recent call last):",
        '  File "pipeline.py", line 19, in fit',
        "    return helper(",
        '  File "pipeline.py", line 13, in helper',
        "    x / 0,",
        "ZeroDivisionError: division by zero",
    ]


def test_a_traceback_names_local_modules_and_lines_at_import(tmp_path: Path) -> None:
    files = {
        "pkg/__init__.py": "",
        "pkg/broken.py": "import os\n\nTABLE = {}\nVALUE = TABLE['ü'] if os.sep else 1\n",
        **single("@step()\ndef fit() -> Text:\n    from pkg.broken import VALUE\n    return VALUE\n"),
    }
    done = run_script(script_of(tmp_path / "project", files), tmp_path / "container")

    assert 'File "pkg/broken.py", line 4, in <module>\n    VALUE = TABLE[' in done.stderr
    assert "KeyError: 'ü'" in done.stderr
    assert done.stderr.count("File ") == 2


CONSTANT = """
RATE = 1
# a comment
OTHER = 2


def used(): return RATE


def unused(): return OTHER


@step()
def fit() -> Text:
    return str(used())
"""


def test_only_an_edit_of_what_the_step_uses_is_another_program(tmp_path: Path) -> None:
    def scripts(body: str, folder: str = "a") -> tuple[str, str]:
        templates = compile_files(tmp_path / folder, single(body))
        return templates["fit"]["script"]["source"], templates["fit"]["metadata"]["annotations"]["tiphys.dev/step"]

    first, spec = scripts(CONSTANT)
    assert scripts(CONSTANT, "b") == (first, spec)
    for before, after in (
        ("OTHER = 2", "OTHER = 3\nMORE = 4"),
        ("# a comment", "\n\n"),
        ("return str(used())", "# why\n    return str(\n        used()\n    )"),
        ("@step()", "@step(annotations={'a': 'b'})"),
    ):
        edited, same_spec = scripts(CONSTANT.replace(before, after))
        assert (program_source(edited), same_spec) == (program_source(first), spec)
    assert scripts(CONSTANT.replace("OTHER = 2", "\nOTHER = 2"))[0] != first
    for before, after in (("RATE = 1", "RATE = 2"), ("return RATE", "return -RATE"), ("str(used())", "'1'")):
        edited, other_spec = scripts(CONSTANT.replace(before, after))
        assert program_source(edited) != program_source(first)
        assert other_spec != spec


def test_lines_are_no_change_of_a_gang_either(tmp_path: Path) -> None:
    def manifest(body: str) -> str:
        text = single(body.replace("@step()", "@train(image='x:1', nodes=2)"))
        return str(compile_files(tmp_path, text)["fit-run"]["resource"]["manifest"])

    first, shifted = manifest(CONSTANT), manifest(f"\n# more\n{CONSTANT}")

    assert first != shifted
    assert program_source(first) == program_source(shifted)
    assert program_source(first) != program_source(manifest(CONSTANT.replace("RATE = 1", "RATE = 2")))


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.12", "3.13"])
def test_the_image_may_have_another_python(version: str, tmp_path: Path) -> None:
    found = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), *Path("/usr/bin").glob(f"python{version}")]
    if not found:
        pytest.skip(f"no Python {version} here")
    script = script_of(tmp_path / "project", {"pipeline.py": HEAD + RESEARCH + TAIL})
    (tmp_path / "script").write_text(replace_tags(script, {"inputs.parameters.rows": "1"}))

    done = subprocess.run(
        [found[0], "script"],
        cwd=tmp_path,
        env={"TIPHYS_OUTPUT_TEXT": "text"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
