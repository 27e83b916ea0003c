"""Make the repository's Markdown files the pages of the site, at the paths that they have in the repository.

mkdocs takes pages from one folder, `docs`. README.md and others lie outside of it and link into it; with every file at
its own path, links work on the site as they do in the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PATTERNS = (
    "*.md",
    "docs/**/*.md",
    "docs/**/*.png",
    "docs/**/*.svg",
    "docs/**/*.css",
    "examples/*/*.md",
    "examples/*/*.png",
    "benchmarks/*.md",
    "benchmarks/*.json",
)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)\)")  # to a file; neither to an anchor nor to another site

_ERROR = re.compile(r"<code>(\w+Error)</code>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of `docs` by those of the repository that PATTERNS name."""
    paths = sorted({path.relative_to(ROOT).as_posix() for pattern in PATTERNS for path in ROOT.glob(pattern)})
    outside = [file for file in files if file.src_dir != config.docs_dir]  # the theme's
    own = [File(path, str(ROOT), config.site_dir, config.use_directory_urls) for path in paths]
    return Files([*outside, *own])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave the text of links to source files and folders, which the site does not have."""

    def shown(link: re.Match[str]) -> str:
        target = (ROOT / page.file.src_uri).parent / link[2]
        is_on_site = target.is_file() and files.get_file_from_path(_path(target)) is not None
        # What is not there stays a link, which mkdocs reports.
        return link[0] if is_on_site or not target.exists() else link[1]

    return _LINK.sub(shown, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Link the names of errors to their entries; mkdocstrings does so only where a docstring's module imports them."""
    # `optional`: Python's own errors have no entry.
    return _ERROR.sub(r'<code><autoref identifier="paceline.nouns.errors.\1" optional>\1</autoref></code>', html)


def _path(target: Path) -> str:
    return target.resolve().relative_to(ROOT).as_posix()


def on_config(config: MkDocsConfig, **_: Any) -> MkDocsConfig:
    """Watch the files outside of `docs`, too, under `mkdocs serve`."""
    config.watch = [*config.watch, *(str(path) for path in ROOT.glob("*.md")), str(ROOT / "src")]
    return config
