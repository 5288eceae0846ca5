"""Draws the packages of the repository as storeys, from the import contracts in pyproject.toml.

``python -m support.checks.storeys`` writes docs/images/storeys.svg; `make golden` does too. The rows are the
layers of import-linter, the sentences are the first ones of the packages' docstrings, so the picture can
show neither an order that is not checked nor a purpose that the code does not state.
"""

import ast
import textwrap
import tomllib
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[3]
PICTURE = ROOT / "docs" / "images" / "storeys.svg"
FOLDERS = {
    "hera_pipelines": ROOT / "hera_pipelines",
    "tiphys_plugin": ROOT / "plugin" / "tiphys_plugin",
    "tiphys_controller": ROOT / "controller" / "tiphys_controller",
    "tiphys": ROOT / "tiphys",
}
_WIDTH, _MARGIN, _GAP, _PADDING = 1180, 12, 8, 10
_NAME_LINE, _LINE, _CHARACTER = 17, 13, 6.1
STYLE = """
  text { font: 11px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #24292f }
  .panel { fill: #f6f8fa; stroke: #8c959f } .box { fill: #ffffff; stroke: #afb8c1 }
  .title { font-size: 15px; font-weight: 600 } .name { font-size: 12.5px; font-weight: 600 } .note { fill: #57606a }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .panel { fill: #161b22; stroke: #6e7681 } .box { fill: #0d1117; stroke: #484f58 }
    .note { fill: #9198a1 }
  }
"""


class _Drawing(NamedTuple):
    """SVG elements and how many pixels they are high."""

    parts: list[str]
    height: int


def layers(package: str) -> list[list[str]]:
    """The layers of a package, the highest first; each is the names of modules that do not import each other."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for contract in config["tool"]["importlinter"]["contracts"]:
        if contract.get("containers") == [package]:
            return [[name.strip() for name in row.split("|")] for row in contract["layers"]]
    raise LookupError(f"pyproject.toml has no contract about the layers of {package}")


def purpose(package: str, name: str) -> str:
    """First sentence of the docstring of a module or package."""
    path = FOLDERS[package] / name
    source = path / "__init__.py" if (path / "__init__.py").exists() else path.with_suffix(".py")
    first = (ast.get_docstring(ast.parse(source.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    return first.split(". ")[0].rstrip(".").replace("`", "")


def svg() -> str:
    """The whole picture."""
    inner = _WIDTH - 2 * _MARGIN
    half = (inner - _MARGIN) // 2
    top = _MARGIN
    parts: list[str] = []
    for row in (
        (("hera_pipelines", inner),),
        (("tiphys_plugin", half), ("tiphys_controller", half)),
        (("tiphys", inner),),
    ):
        drawings = [_panel(package, width) for package, width in row]
        height = max(drawing.height for drawing in drawings)
        left = _MARGIN
        for (_, width), drawing in zip(row, drawings, strict=True):
            parts.append(f'<g transform="translate({left} {top})">')
            parts.append(f'<rect class="panel" width="{width}" height="{height}" rx="6"/>')
            parts += [*drawing.parts, "</g>"]
            left += width + _MARGIN
        top += height + _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" role="img" '
            'aria-label="Packages of Tiphys in layers; each imports only what lies below it">',
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>\n",
        ]
    )


def _panel(package: str, width: int) -> _Drawing:
    title = f'<text class="title" x="{_PADDING}" y="{_PADDING + 12}">{package}</text>'
    parts, top = [title], _PADDING + 24
    for row in layers(package):
        drawn = _row(package, row, width - 2 * _PADDING)
        parts += [f'<g transform="translate({_PADDING} {top})">', *drawn.parts, "</g>"]
        top += drawn.height + _GAP
    return _Drawing(parts, top - _GAP + _PADDING)


def _row(package: str, names: list[str], width: int) -> _Drawing:
    each = (width - _GAP * (len(names) - 1)) // len(names)
    columns = int((each - 2 * _PADDING) / _CHARACTER)
    texts = [textwrap.wrap(purpose(package, name), columns) for name in names]
    height = _NAME_LINE + _LINE * max(map(len, texts)) + _PADDING
    parts = []
    for index, (name, lines) in enumerate(zip(names, texts, strict=True)):
        left = index * (each + _GAP)
        parts.append(f'<rect class="box" x="{left}" width="{each}" height="{height}" rx="4"/>')
        parts.append(f'<text class="name" x="{left + _PADDING}" y="{_NAME_LINE}">{name}</text>')
        parts += (
            f'<text class="note" x="{left + _PADDING}" y="{_NAME_LINE + _LINE * number}">{escape(line)}</text>'
            for number, line in enumerate(lines, 1)
        )
    return _Drawing(parts, height)


if __name__ == "__main__":
    PICTURE.write_text(svg())
