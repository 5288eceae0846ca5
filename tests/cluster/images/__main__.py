"""`make images`: archives in build/images, for `ctr images import`, `docker load` or `kind load image-archive`."""

# ruff: noqa: T201  printing is what a command is for

import sys
from pathlib import Path

from ..harness import archive
from ..harness.binaries import locked, replace_link
from ..harness.errors import HarnessError
from ..harness.machine import install_packages, require_root
from ..harness.settings import Settings
from . import layers
from .recipe import ROOT, Recipe, recipes

_KEPT = 3


def main() -> int:
    try:
        require_root()
        install_packages()
        cache = Settings.read().cache / "images"
        with locked(cache / "lock"):
            for recipe in recipes().values():
                print(*build(recipe, cache, ROOT / "build/images"))
    except HarnessError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


def build(recipe: Recipe, cache: Path, folder: Path) -> tuple[str, Path]:
    """Write one image; its reference, whose tag changes with its content, and the path of the archive."""
    parts = [layers.base(cache), layers.packages(cache, recipe), layers.sources(cache, recipe)]
    tag = layers.digest(*(part.name for part in parts), str(recipe))
    reference, target = f"tiphys.test/{recipe.name}:{tag}", folder / f"{recipe.name}-{tag}.tar"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        archive.write(target, reference, parts, recipe.config(tag))
    target.touch()
    (folder / f"{recipe.name}.reference").write_text(reference)
    replace_link(folder / f"{recipe.name}.tar", target)
    _forget_old(folder, recipe)
    return reference, target


def _forget_old(folder: Path, recipe: Recipe) -> None:
    """Keep a few: other tests may be about to import one."""
    written = sorted(folder.glob(f"{recipe.name}-????????????.tar"), key=lambda path: path.stat().st_mtime)
    for path in written[:-_KEPT]:
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
