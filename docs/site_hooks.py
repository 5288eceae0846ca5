"""Makes README the front page of the site, and leaves out links to files of the repository that are no pages.

`mkdocs` calls the functions by their names (MkDocs, "Hooks").
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
_FRONT_PAGE_PATH = re.compile(r"\]\(docs/")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the front page."""
    readme = (Path(config.docs_dir).parent / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=_FRONT_PAGE_PATH.sub("](", readme)))
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
