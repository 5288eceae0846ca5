"""Copies `tiphys-exec` with a Python of its own into a folder, so that an image that has neither can run it.

An init container calls it, as Argo's brings ``argoexec``. The copy has its own
loader and C library: it also runs in an image of another Linux distribution, and
its variables reach no program that it starts.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import tiphys
from tiphys.errors import StoreError, UsageError

REQUIRED_PACKAGES = ("boto3", "pydantic")
OPTIONAL_PACKAGES = ("prometheus-client", "google-cloud-storage", "azure-storage-blob", "azure-identity")
LOADER = "lib/loader"
PYTHON = "bin/python"
_PACKAGES = "packages"
_LINKED = re.compile(r"^[ \t]*(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)
_UNNEEDED = shutil.ignore_patterns(
    "__pycache__",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "ensurepip",
    "turtledemo",
    "lib2to3",
    "config-*",
)


def runtime_command(folder: str, module: str = "tiphys.checkpoint.exec") -> list[str]:
    """The command that runs a program of Tiphys from the copy in ``folder``; its options follow.

    Python is isolated, so that variables such as PYTHONPATH of the program do not reach it, and finds its packages
    without `site`, which distributions change.
    """
    start = f"import sys; sys.path.append('{folder}/{_PACKAGES}'); from {module}.__main__ import main; sys.exit(main())"
    return [f"{folder}/{LOADER}", "--library-path", f"{folder}/lib", f"{folder}/{PYTHON}", "-I", "-S", "-c", start]


def install_runtime(folder: Path) -> None:
    """Copy Python, its standard library, `tiphys` and what that needs into ``folder``, which may hold an older copy.

    Raises:
        UsageError: this system is not Linux with the GNU C library, or a needed package is not installed.
        StoreError: the folder cannot be written.
    """
    python = Path(sys.executable).resolve()
    try:
        packages, library = folder / _PACKAGES, folder / "lib" / f"python{sysconfig.get_python_version()}"
        shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=_UNNEEDED, dirs_exist_ok=True)
        without_cache = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(tiphys.__file__).parent, packages / "tiphys", ignore=without_cache, dirs_exist_ok=True)
        for source, target in _package_files():
            (packages / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, packages / target)
        (folder / PYTHON).parent.mkdir(exist_ok=True)
        shutil.copy(python, folder / PYTHON)
        binaries = [python, *library.rglob("*.so"), *packages.rglob("*.so")]
        loader, libraries = _find_libraries(binaries)
        for shared in sorted(libraries):
            shutil.copy(shared, folder / "lib" / shared.name)
        shutil.copy(loader, folder / LOADER)
    except OSError as error:
        raise StoreError(f"{folder}: tiphys-exec cannot be copied there: {error}") from error


def _package_files() -> Iterator[tuple[Path, Path]]:
    """Each file of the needed packages, and its path below ``site-packages``."""
    for name in sorted(_needed_packages()):
        for file in importlib.metadata.files(name) or []:
            source = Path(str(file.locate()))
            if ".." not in file.parts and file.suffix != ".pyc" and source.is_file():  # images drop listed scripts
                yield source, Path(*file.parts)


def _needed_packages() -> set[str]:
    found: set[str] = set()
    waiting = [*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            if name in REQUIRED_PACKAGES:
                raise UsageError(f"{name} is not installed here, and tiphys-exec needs it") from None
            continue
        found.add(name)
        waiting += [
            match[0]
            for requirement in requires
            if "extra ==" not in requirement and (match := re.match(r"[\w.-]+", requirement))
        ]
    return found


def _find_libraries(binaries: Iterable[Path]) -> tuple[Path, set[Path]]:
    """The loader of the C library that runs this process, and all shared libraries that ``binaries`` need.

    Raises:
        UsageError: this process has another loader, such as that of musl.
    """
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    loader = next((Path(path) for path in sorted(mapped) if Path(path).name.startswith("ld-linux")), None)
    if loader is None:
        raise UsageError(
            "tiphys-exec can be copied only from an image with the GNU C library, such as that of trainings"
        )
    libraries: set[Path] = set()
    for binary in binaries:
        listed = subprocess.run(
            [loader, "--list", binary], capture_output=True, text=True, timeout=60, env={"LC_ALL": "C"}, check=False
        )
        libraries |= {Path(path) for path in _LINKED.findall(listed.stdout)}
    return loader, {path for path in libraries if not path.name.startswith("ld-linux")}
