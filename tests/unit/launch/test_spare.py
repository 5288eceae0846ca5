"""A spare process: which programs have one, that it runs the program as ``python`` does, and who ends it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes.polling import until

from tiphys.launch import pod_memory
from tiphys.launch import spare as spare_module
from tiphys.launch.pod_memory import PodMemory
from tiphys.launch.process_table import ProcessStat
from tiphys.launch.processes import ChildProcess, SignalQueue
from tiphys.launch.session_registry import ProgramImports, describe_imports
from tiphys.launch.spare import Spare, SpareKeeper, parse_python

REPORT = """
import json, os, sys, __main__
open(os.environ["OUT"], "w").write(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": globals().get("__file__"),
    "main": __main__.__dict__ is globals(), "package": __package__, "globals": sorted(globals()),
    "flags": [sys.flags.optimize, sys.flags.dont_write_bytecode], "word": os.environ.get("WORD"),
}))
"""


@pytest.mark.parametrize(
    ("command", "parsed"),
    [
        ("python train.py --lr 1", (["python"], ["script", "train.py", "--lr", "1"])),
        ("/opt/bin/python3.11 -u -O train.py", (["/opt/bin/python3.11", "-u", "-O"], ["script", "train.py"])),
        ("python -m trainer.run -m x", (["python"], ["-m", "trainer.run", "-m", "x"])),
        ("python -um trainer", (["python", "-u"], ["-m", "trainer"])),
        ("python -W error -X dev train.py", (["python", "-W", "error", "-X", "dev"], ["script", "train.py"])),
        ("python -Wmc train.py", (["python", "-Wmc"], ["script", "train.py"])),
        ("python -mpkg.train --config conf.yaml", (["python"], ["-m", "pkg.train", "--config", "conf.yaml"])),
        ("python -uOmpkg -x", (["python", "-uO"], ["-m", "pkg", "-x"])),
        ("python -cpass x.py", (["python"], ["-c", "pass", "x.py"])),
        ("python -mabc x", (["python"], ["-m", "abc", "x"])),
        ("python -i train.py", None),
        ("python --check-hash-based-pycs always train.py", None),
        ("python -c pass", (["python"], ["-c", "pass"])),
        ("python", None),
        ("python -", None),
        ("python -m", None),
        ("pythonic train.py", None),
        ("torchrun train.py", None),
        ("sh -c python", None),
        ("", None),
    ],
)
def test_command_of_python_is_split(command: str, parsed: tuple[list[str], list[str]] | None) -> None:
    assert parse_python(command.split()) == parsed


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare that is slow, as on a busy machine, is no broken one."""
    monkeypatch.setattr(spare_module, "_READY_SECONDS", 120.0)
    monkeypatch.setattr(spare_module, "_TAKE_OVER_SECONDS", 120.0)


def take_over(spare: Spare, environ: dict[str, str], *modules: str) -> int | None:
    """The exit code of a program that the spare becomes."""
    spare.prepare(["json", "no_such_module", "decimal", *modules])

    keeper = SpareKeeper(["false"], environ)
    keeper.spare = spare
    with SignalQueue() as signals:
        child = ChildProcess(["false"], environ, take_over=keeper.take_over, find_helpers=keeper.find_group)
        while child.exit_code is None:
            signals.wait_next(0.05)
            child.reap()
    return child.exit_code


@pytest.mark.parametrize("options", [[], ["-O"], ["-B", "-P"]], ids=str)
@pytest.mark.parametrize("kind", ["script", "module", "code"])
def test_spare_runs_the_program_as_python_does(tmp_path: Path, monkeypatch, kind: str, options: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "träiner.py").write_text(REPORT)
    target = {"script": ["sub/träiner.py"], "module": ["-m", "sub.träiner"], "code": ["-c", REPORT]}[kind]
    environ = {**os.environ, "WORD": "später", "OUT": str(tmp_path / "expected")}
    command = [sys.executable, *options, *target, "--lr", "0 1"]
    if kind == "module":
        environ["PYTHONPATH"] = str(tmp_path)  # with -P the folder itself is no place for modules
    subprocess.run(command, env=environ, check=True, timeout=600)
    parsed = parse_python(command)
    assert parsed is not None
    spare = Spare(*parsed, {**environ, "WORD": "before"})
    assert take_over(spare, {**environ, "OUT": str(tmp_path / "found")}) == 0
    assert json.loads((tmp_path / "found").read_text()) == json.loads((tmp_path / "expected").read_text())


def has_ended(pid: int) -> bool:
    try:
        return ProcessStat(str(pid)).state in "ZX"  # this process may be the one that has to reap it
    except OSError:
        return True


def test_spare_ends_with_its_launcher() -> None:
    script = (
        "import os, sys, time\n"
        "from tiphys.launch.spare import Spare\n"
        "spare = Spare([sys.executable], ['-c', 'pass'], os.environ)\n"
        "spare.prepare(['json'])\n"
        "print(spare.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
    until(lambda: has_ended(int(ended.stdout)))


def test_spare_that_is_not_ready_takes_nothing_over(monkeypatch) -> None:
    monkeypatch.setattr("tiphys.launch.spare._READY_SECONDS", 0.01)
    spare = Spare([sys.executable], ["-c", "print('begun')"], dict(os.environ))
    assert spare.take_over({}) is None
    spare.close(ends=True)
    assert spare.has_ended()


def test_processes_that_an_import_of_a_spare_starts_end_with_it(tmp_path: Path, monkeypatch) -> None:
    look = Spare.has_ended

    def look_late(spare: Spare) -> bool:
        time.sleep(0.5)  # the spare has the time to end by itself, if it was told to
        return look(spare)

    monkeypatch.setattr(Spare, "has_ended", look_late)
    (tmp_path / "busy.py").write_text(
        "import os, subprocess\n"
        "child = subprocess.Popen(['sh', '-c', 'sleep 600 & echo $! > \"$OUT.new\"; mv \"$OUT.new\" \"$OUT\"; wait'])"
    )
    out = tmp_path / "pid"
    spare = Spare([sys.executable], ["-c", "pass"], {**os.environ, "PYTHONPATH": str(tmp_path), "OUT": str(out)})
    spare.prepare(["busy"])
    until(out.exists)
    spare.close(ends=True)
    until(lambda: has_ended(int(out.read_text())))


def test_processes_that_an_import_of_a_spare_starts_end_with_the_program_that_it_becomes(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(
        "import os, pathlib, subprocess\n"
        "pathlib.Path(os.environ['OUT']).write_text(str(subprocess.Popen(['sleep', '600']).pid))"
    )
    out = tmp_path / "pid"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "OUT": str(out)}
    spare = Spare([sys.executable], ["-c", "pass"], environ)
    assert take_over(spare, environ, "busy") == 0
    assert has_ended(int(out.read_text()))


def test_spare_that_cannot_be_started_leaves_no_descriptor(tmp_path: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(FileNotFoundError):
        Spare([str(tmp_path / "python")], ["-c", "pass"], {})
    assert set(Path("/proc/self/fd").iterdir()) <= before  # what an earlier test has left may be closed meanwhile


def test_spare_that_was_killed_takes_nothing_over() -> None:
    spare = Spare([sys.executable], ["-c", "pass"], dict(os.environ))
    spare.prepare(["json"])
    os.kill(spare.pid, 9)
    until(spare.has_ended)
    assert spare.take_over({}) is None
    spare.close(ends=True)


@pytest.mark.parametrize(
    ("wish", "free", "began", "is_kept"),
    [
        ("", 0.5, True, True),
        ("", 0.3, False, False),  # 40 % must be free
        ("on", 0.01, True, True),  # the author knows
        ("off", 0.9, False, False),
    ],
)
def test_spare_needs_memory_unless_it_is_asked_for(monkeypatch, wish: str, free: float, began: bool, is_kept: bool):
    limit = 8 << 30
    monkeypatch.setattr(spare_module, "_DEFAULT_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(pod_memory, "read_pod_memory", lambda: PodMemory(limit, int(free * limit)))
    keeper = SpareKeeper([sys.executable, "-c", "pass"], {**os.environ, "TIPHYS_SPARE": wish})
    try:
        keeper.look(lambda: None)
        assert keeper.spare is None  # before a commit
        keeper.look(lambda: ProgramImports(["json"]))
        assert (keeper.spare is not None) is began
        monkeypatch.setattr(pod_memory, "read_pod_memory", lambda: PodMemory(limit, limit // 5))
        keeper.look(lambda: ProgramImports(["json"]))
        assert (keeper.spare is not None) is is_kept  # 15 % suffice for one that is there
        monkeypatch.setattr(pod_memory, "read_pod_memory", lambda: PodMemory(limit, limit // 10))
        keeper.look(lambda: ProgramImports(["json"]))
        keeper.look(lambda: ProgramImports(["json"]))
        assert (keeper.spare is not None) is (wish == "on")
    finally:
        keeper.close()


def test_spare_imports_with_the_variables_that_the_program_had_set(tmp_path: Path) -> None:
    """Libraries read some of them when they are imported, and add others; loggers of theirs keep the streams."""
    (tmp_path / "library.py").write_text(
        "import logging, os, sys\n"
        "threads = os.environ.get('OMP_NUM_THREADS')\n"
        "os.environ['ADDED'] = 'by the library'\n"
        "handler = logging.StreamHandler()\n"
        "print('noise')\n"
    )
    program = (
        "import json, os\n"
        "seen = {name: os.environ.get(name) for name in ('OMP_NUM_THREADS', 'ADDED', 'GONE', 'OWN')}\n"
        "import library\n"
        "library.handler.stream.write('')\n"
        "open(os.environ['OUT'], 'w').write(json.dumps([library.threads, seen]))\n"
    )
    start = {**os.environ, "PYTHONPATH": str(tmp_path), "GONE": "x", "OUT": str(tmp_path / "out")}
    start.pop("OMP_NUM_THREADS", None)
    now = {**start, "OMP_NUM_THREADS": "1", "OWN": "sp ä=ce"}
    del now["GONE"]
    initial = b"\0".join(os.fsencode(f"{name}={value}") for name, value in start.items())
    imports = ProgramImports(describe_imports(initial, now))
    assert imports.apply_to(start) == now
    spare = Spare([sys.executable], ["-c", program], imports.apply_to(start))
    spare.prepare(["library"])
    with SignalQueue() as signals:
        child = ChildProcess(["false"], start, take_over=spare.take_over)
        while child.exit_code is None:
            signals.wait_next(0.05)
            child.reap()
    spare.close(ends=False)
    assert child.exit_code == 0
    threads, seen = json.loads((tmp_path / "out").read_text())
    assert threads == "1"
    assert seen == {"OMP_NUM_THREADS": None, "ADDED": "by the library", "GONE": "x", "OWN": None}


@pytest.mark.parametrize("content", [b"PK\x03\x04\0\0", None])
def test_no_spare_for_an_archive_or_a_folder(tmp_path: Path, content: bytes | None, capfd) -> None:
    target = tmp_path / "app"
    target.mkdir() if content is None else target.write_bytes(content)
    keeper = SpareKeeper([sys.executable, str(target)], {**os.environ, "TIPHYS_SPARE": "on"})
    keeper.look(lambda: ProgramImports(["json"]))
    assert keeper.spare is None
    assert f"{target} is no file with a program of Python" in capfd.readouterr().err


def test_spare_that_does_not_read_holds_nothing_up() -> None:
    spare = Spare(["sleep", "600"], [], dict(os.environ))
    assert not spare.prepare(["x" * 1000] * 5000)
    spare.close(ends=True)
