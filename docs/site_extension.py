"""The extension of Python-Markdown that applies ``docs/site.py`` to every page; ``zensical.toml`` names it."""

from __future__ import annotations

from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from zensical.extensions.context import ContextPreprocessor

from docs.site import DOCS, expanded


class SitePreprocessor(Preprocessor):
    """Replaces the text of a page, or of a docstring on it, by what the site shows."""

    def run(self, lines: list[str]) -> list[str]:
        """Return the lines that the site shows."""
        context = ContextPreprocessor.from_markdown(self.md)
        page = DOCS / (context.page.path if context else "index.md")
        return expanded("\n".join(lines), page).split("\n")


class SiteExtension(Extension):
    """Runs the preprocessor before blocks of code are taken out of the text."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the preprocessor."""
        md.preprocessors.register(SitePreprocessor(md), "polydyn_site", 100)


def makeExtension(**_: Any) -> SiteExtension:
    """Return the extension; Python-Markdown calls this."""
    return SiteExtension()
