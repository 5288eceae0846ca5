"""`make images`: archives in build/images, for `ctr images import`, `docker load` or `kind load image-archive`."""

# ruff: noqa: T201  printing is what a command is for

import sys
from pathlib import Path

from ..harness import archive
from ..harness.errors import HarnessError
from ..harness.machine import install_packages, require_root
from ..harness.settings import Settings
from . import layers
from .recipe import ROOT, Recipe, recipes


def main() -> int:
    try:
        require_root()
        install_packages()
        for recipe in recipes().values():
            reference, path = build(recipe, Settings.read().cache / "images", ROOT / "build/images")
            print(reference, path)
    except HarnessError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


def build(recipe: Recipe, cache: Path, folder: Path) -> tuple[str, Path]:
    """Write one image; its reference, whose tag changes with its content, and the path of the archive."""
    parts = [layers.base(cache), layers.packages(cache, recipe), layers.sources(cache, recipe)]
    tag = layers.digest(*(part.name for part in parts), str(recipe))
    reference, target = f"tiphys.test/{recipe.name}:{tag}", folder / f"{recipe.name}.tar"
    stamp = target.with_suffix(".reference")
    if not (target.exists() and stamp.exists() and stamp.read_text() == reference):
        folder.mkdir(parents=True, exist_ok=True)
        archive.write(target, reference, parts, recipe.config(tag))
        stamp.write_text(reference)
    return reference, target


if __name__ == "__main__":
    sys.exit(main())
