"""Makes README the front page of the site, adds the options of each command, and keeps only links between pages.

`mkdocs` calls the functions by their names (MkDocs, "Hooks").
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from hera_pipelines.cli.app import COMMANDS

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
_COLUMNS = 100
_FRONT_PAGE_PATH = re.compile(r"\]\(docs/")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the front page, the page of all options, and the list of pages for language models."""
    readme = (Path(config.docs_dir).parent / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=_FRONT_PAGE_PATH.sub("](", readme)))
    files.append(File.generated(config, "options.md", content=describe_commands()))
    files.append(File.generated(config, "llms.txt", content=list_pages(config)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Keep the text of a link whose target is not on the site."""
    folder = Path(config.docs_dir)
    here = (folder / page.file.src_uri).parent

    def keep_or_unlink(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        found = files.get_file_from_path(str(target.relative_to(folder))) if target.is_relative_to(folder) else None
        return link[0] if found is not None and not found.inclusion.is_excluded() else link[1]

    return _LINK.sub(keep_or_unlink, markdown)


def list_pages(config: MkDocsConfig) -> str:
    """The pages by section, in the form of llmstxt.org."""

    def lines(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            [(title, content)] = entry.items()
            if isinstance(content, list):
                yield from ("", f"## {title}", "", *lines(content), "")
            else:
                yield f"- [{title}]({content.removesuffix('.md')}.html)"

    return "\n".join([f"# {config.site_name}", "", f"> {config.site_description}", "", *lines(config.nav or [])]) + "\n"


def describe_commands() -> str:
    """Markdown with the help of each command of ``tiphys``."""
    parts = ["# All options of each command"]
    for name, source in COMMANDS.items():
        command = source.load(name)
        for words, one in {name: command, **_subcommands(name, command)}.items():
            context = one.context_class(one, info_name=f"tiphys {words}", max_content_width=_COLUMNS)
            parts.append(f"## tiphys {words}\n\n```text\n{one.get_help(context)}\n```")
    return "\n\n".join(parts) + "\n"


def _subcommands(name: str, command: Any) -> dict[str, Any]:
    return {f"{name} {inner}": one for inner, one in getattr(command, "commands", {}).items()}
