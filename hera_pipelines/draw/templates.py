"""Loads the templates of pictures and pages.

They escape every value and show control characters as symbols, so no text can break
out of the document or turn it around.
"""

from functools import cache
from typing import TYPE_CHECKING

from hera_pipelines.control_characters import replace_control_characters

if TYPE_CHECKING:
    from jinja2 import Environment, Template


@cache
def load_picture_template(name: str) -> "Template":
    environment = create_environment("hera_pipelines.draw")
    environment.filters["shorten"] = shorten
    return environment.get_template(name)


def create_environment(package: str, folder: str = "") -> "Environment":
    # Imported here, because most commands that import this package draw no picture.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader(package, folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: replace_control_characters(value) if type(value) is str else value,
    )


def shorten(text: str, characters: int) -> str:
    """``text``, cut at its end if it is longer than ``characters``."""
    return text if len(text) <= characters else text[: characters - 1].rstrip() + "…"
