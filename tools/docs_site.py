"""What `mkdocs build` does to the pages of docs/ on their way to the site. mkdocs.yml names it as a hook.

{{ README: heading }}       becomes that section of README.md, so that nothing is written twice
[text](../paddle_kv/a.py)   a file outside of docs/: its name, since the site has pages only; the file has to exist
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SECTION = re.compile(r"^\{\{ README: (.+?) \}\}$", re.M)
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)#]+)(#[^)]*)?\)")


def section_of_readme(heading: str) -> str:
    """The text below a heading, up to the next one of its level; links as seen from docs/."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", (ROOT / "README.md").read_text(), re.S | re.M)
    if found is None:
        raise ValueError(f"README.md has no heading {heading!r}")
    return LINK.sub(lambda link: f"{link[1]}[{link[2]}]({_from_docs(link[3])}{link[4] or ''})", found[1]).strip()


def _from_docs(target: str) -> str:
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"


def without_files(markdown: str, page: Path) -> str:
    """Links that lead out of docs/, or to a folder, become the text of the link.

    Raises:
        ValueError: the target of one does not exist.
    """

    def replaced(link: re.Match[str]) -> str:
        target = (page.parent / link[3]).resolve()
        if target.is_relative_to(DOCS) and not target.is_dir():
            return link[0]  # mkdocs checks it
        if not target.exists():
            raise ValueError(f"{page.relative_to(ROOT)} links to {link[3]}, which does not exist")
        return link[2] if link[2].startswith("`") else f"`{link[2]}`"

    return LINK.sub(replaced, markdown)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    path = DOCS / page.file.src_uri
    up = "../" * page.file.src_uri.count("/")

    def included(found: re.Match[str]) -> str:
        text = section_of_readme(found[1])
        return LINK.sub(lambda link: f"{link[1]}[{link[2]}]({up}{link[3]}{link[4] or ''})", text)

    return without_files(SECTION.sub(included, markdown), path)
