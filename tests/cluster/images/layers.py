"""The three layers of an image. Each is kept under a key of everything that decides its content."""

import hashlib
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

from ..harness.machine import run, say
from .recipe import HOME, PYTHON, ROOT, SITE, Recipe

_SUITE = "bookworm"
_PACKAGES = (PYTHON, "ca-certificates", "dash", "libstdc++6")  # NumPy's wheels want the last
_BASE_REVISION = "1"  # to be raised with every change of how the base is made
_UNNEEDED = ("doc", "man", "locale", "info", "lintian", "bash-completion", "bug", "menu", "pixmaps", "applications")
_PASSWD = "root:x:0:0:root:/root:/sbin/nologin\ntiphys:x:65532:65532:tiphys:/tmp:/sbin/nologin\n"
_GROUP = "root:x:0:\ntiphys:x:65532:\n"
# Byte code is checked against nothing at run time: the sources beside it cannot change in an image.
_COMPILE = (PYTHON, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash")


def base(cache: Path) -> Path:
    """Debian's Python and an empty virtual environment."""
    return _kept(cache, "base", digest(_SUITE, *_PACKAGES, _BASE_REVISION), _make_base)


def packages(cache: Path, recipe: Recipe) -> Path:
    """The locked packages of the recipe's extras."""
    wanted = _requirements(recipe)
    key = digest(wanted, *recipe.botocore_services, base(cache).name)

    def make(folder: Path) -> None:
        _install(wanted, folder / SITE.lstrip("/"))
        if recipe.botocore_services:
            _keep_services(folder / SITE.lstrip("/") / "botocore/data", recipe.botocore_services)
        _compile(cache, folder)

    return _kept(cache, f"packages-{recipe.name}", key, make)


def sources(cache: Path, recipe: Recipe) -> Path:
    """The packages of this repository, without what the tests of the day have left in them."""
    files = [path for source in recipe.sources for path in sorted((ROOT / source).rglob("*")) if _belongs(path)]
    digests = [f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]

    def make(folder: Path) -> None:
        for path in files:
            source = next(each for each in recipe.sources if path.is_relative_to(ROOT / each))
            target = folder / SITE.lstrip("/") / path.relative_to((ROOT / source).parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        _compile(cache, folder)

    return _kept(cache, f"sources-{recipe.name}", digest(*digests, base(cache).name), make)


def _kept(cache: Path, name: str, key: str, make: Callable[[Path], None]) -> Path:
    """The layer as a tar file, made if it is not kept yet; of one name, only the newest is kept."""
    layer = cache / f"{name}-{key}.tar"
    if not layer.exists():
        say(f"image layer {name}")
        cache.mkdir(parents=True, exist_ok=True)
        folder = cache / f".{name}-{key}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        make(folder)
        _pack(folder, layer)
        if name != "base":
            shutil.rmtree(folder)
        for old in cache.glob(f"{name}-????????????.tar"):
            if old != layer:
                old.unlink()
    return layer


def _make_base(root: Path) -> None:
    names = ",".join(_PACKAGES)
    run("mmdebstrap", "--quiet", "--variant=extract", f"--include={names}", _SUITE, root)
    for name in _UNNEEDED:
        shutil.rmtree(root / "usr/share" / name, ignore_errors=True)
    for folder in ("var/cache/apt", "var/lib/apt", "var/lib/dpkg", "var/log", "etc/apt", "dev"):
        shutil.rmtree(root / folder, ignore_errors=True)
    authorities = sorted((root / "usr/share/ca-certificates/mozilla").glob("*.crt"))
    (root / "etc/ssl/certs/ca-certificates.crt").write_text("".join(path.read_text() for path in authorities))
    (root / "etc/passwd").write_text(_PASSWD)
    (root / "etc/group").write_text(_GROUP)
    if not (root / "bin/sh").exists():
        (root / "bin/sh").symlink_to("dash")
    (root / "tmp").mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)
    _make_environment(root)
    run("chroot", root, *_COMPILE, f"/usr/lib/{PYTHON}")


def _make_environment(root: Path) -> None:
    (root / SITE.lstrip("/")).mkdir(parents=True)
    home = root / HOME.lstrip("/")
    (home / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    (home / "bin").mkdir()
    for name, target in ((PYTHON, f"/usr/bin/{PYTHON}"), ("python3", PYTHON), ("python", PYTHON)):
        (home / "bin" / name).symlink_to(target)


def _requirements(recipe: Recipe) -> str:
    extras = [word for extra in recipe.extras for word in ("--extra", extra)]
    options = ("--frozen", "--no-dev", "--no-emit-project", "--no-header", "--no-annotate", "--quiet")
    return run(_uv(), "export", *options, *extras, cwd=ROOT)


def _install(requirements: str, site: Path) -> None:
    site.mkdir(parents=True)
    platform = ("--python-version", PYTHON.removeprefix("python"), "--python-platform", "x86_64-unknown-linux-gnu")
    options = ("--quiet", "--require-hashes", "--only-binary", ":all:", "--link-mode", "copy", *platform)
    run(_uv(), "pip", "install", *options, "--target", site, "--requirements", "-", text=requirements)
    shutil.rmtree(site / "bin", ignore_errors=True)
    (site / ".lock").unlink(missing_ok=True)


def _keep_services(data: Path, services: list[str]) -> None:
    for folder in data.iterdir():
        if folder.is_dir() and folder.name not in services:
            shutil.rmtree(folder)


def _compile(cache: Path, folder: Path) -> None:
    """Compile with the Python of the image, under the paths of the image."""
    root = cache / f".{base(cache).stem}"
    script = 'over=$1; root=$2; shift 2; mount --bind "$over" "$root$0"; exec chroot "$root" "$@"'
    run("unshare", "--mount", "sh", "-euc", script, HOME, folder / HOME.lstrip("/"), root, *_COMPILE, SITE)


def _pack(folder: Path, layer: Path) -> None:
    """Pack a folder so that the same files make the same bytes: no times, no owners."""
    new = layer.with_name(f".{layer.name}")
    with tarfile.open(new, "w") as tar:
        tar.add(folder, arcname=".", filter=_anonymous)
    new.replace(layer)


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    info.mode |= 0o444 | (0o111 if info.isdir() else 0)
    return info


def _belongs(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def digest(*parts: str) -> str:
    """A short key of texts."""
    return hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]


def _uv() -> str:
    """`make` brings uv along where it is absent."""
    return os.environ.get("UV") or shutil.which("uv") or str(ROOT / ".tools/bin/uv")
