"""The images of the tests and those that people build by Docker hold the same."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from cluster.images.recipe import ENVIRONMENT, ROOT, SITE, Recipe, recipes
from support.checks.locked_packages import locked_packages

RECIPES = list(recipes().values())
each_image = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def instructions(recipe: Recipe) -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, rest), comments gone and continued lines joined."""
    lines = [line for line in (ROOT / recipe.dockerfile).read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def last(recipe: Recipe, instruction: str) -> str | None:
    found = [rest for word, rest in instructions(recipe) if word == instruction]
    return found[-1] if found else None


@each_image
def test_the_same_packages_and_sources(recipe: Recipe) -> None:
    runs = " ".join(rest for word, rest in instructions(recipe) if word == "RUN")
    assert re.findall(r"--extra (\S+)", runs) == recipe.extras
    assert re.findall(r"-name (\S+)", runs) == recipe.botocore_services
    copied = [rest.split() for word, rest in instructions(recipe) if word == "COPY" and SITE in rest]
    assert copied == [[source, f"{SITE}/{Path(source).name}"] for source in recipe.sources]


@each_image
def test_the_same_user_start_and_environment(recipe: Recipe) -> None:
    assert last(recipe, "USER") == recipe.user
    assert json.loads(last(recipe, "ENTRYPOINT") or "[]") == recipe.entrypoint
    assert json.loads(last(recipe, "CMD") or "[]") == recipe.command
    assert last(recipe, "WORKDIR") == recipe.working_dir
    assert dict(word.split("=", 1) for word in (last(recipe, "ENV") or "").split()) == ENVIRONMENT


@each_image
def test_the_same_labels(recipe: Recipe) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    arguments = dict(rest.split("=", 1) for word, rest in instructions(recipe) if word == "ARG" and "=" in rest)
    labels = dict(re.findall(r'([\w.]+)="([^"]*)"', last(recipe, "LABEL") or ""))
    filled = {name: arguments.get(value.strip("${}"), value) for name, value in labels.items()}
    assert filled == recipe.config("unknown")["Labels"]
    assert filled["org.opencontainers.image.version"] == version


@each_image
def test_the_base_of_an_image_is_pinned_by_digest_and_the_same_for_all(recipe: Recipe) -> None:
    (_, base), *_ = instructions(recipe)
    assert re.fullmatch(r"BASE=python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert {instructions(other)[0] for other in RECIPES} == {("ARG", base)}
    assert {rest.split()[0] for word, rest in instructions(recipe) if word == "FROM"} == {"${BASE}"}


@each_image
def test_images_do_not_run_as_root(recipe: Recipe) -> None:
    user, _, group = recipe.user.partition(":")
    assert int(user) > 0
    assert int(group) > 0


@each_image
def test_every_source_is_a_package_here(recipe: Recipe) -> None:
    assert all((ROOT / source / "__init__.py").is_file() for source in recipe.sources)


@each_image
def test_no_image_holds_the_client_library_of_kubernetes(recipe: Recipe) -> None:
    """123 MB of which a pod uses nothing: it connects by its service account."""
    assert not {"kubernetes", "hera", "httpx"} & locked_packages(recipe.extras)
    assert {"kubernetes", "structlog", "urllib3"} <= locked_packages(["pipelines"])


IMPORT_ALL = """
import importlib, pkgutil, sys
absent, packages = set(sys.argv[1].split(",")), sys.argv[2:]
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
for package in map(importlib.import_module, packages):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
"""


def test_the_services_start_with_what_their_image_holds() -> None:
    recipe = recipes()["tiphys"]
    installed = locked_packages(recipe.extras)
    absent = [
        module
        for module, names in packages_distributions().items()
        if not any(re.sub("[-_.]+", "-", name).lower() in installed for name in names)
    ]
    assert {"kubernetes", "hera", "numpy"} <= set(absent)
    pages = ("hera_pipelines.ui", "hera_pipelines.draw", "hera_pipelines.cli.look")
    packages = ("tiphys.kube", "tiphys_plugin", "tiphys_controller", *pages)
    subprocess.run([sys.executable, "-c", IMPORT_ALL, ",".join(absent), *packages], check=True, timeout=300)
