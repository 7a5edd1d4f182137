"""The Python of every page runs as it stands there; what leads from page to page leads somewhere."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docs_site import section_of_readme, without_files

import paddle_kv.integrations
import paddle_kv.offload
import paddle_kv.ops
from tests.schedule.rig import Copies

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CODE = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)
WITH_CODE = [page for page in PAGES if CODE.search(page.read_text())]


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path) -> None:
    if "prometheus_client" in page.read_text():
        pytest.importorskip("prometheus_client")
    names: dict[str, object] = {"__name__": page.stem}
    text = page.read_text()
    for block in CODE.finditer(text):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(page), "exec"), names)  # errors name the line of the page


def test_the_server_of_the_guide_computes_anew_what_a_failed_load_leaves_out(copies: Copies) -> None:
    text = (DOCS / "guides" / "server.md").read_text()
    program = "\n".join(CODE.findall(text.partition("## 5. Serve")[0]))
    names: dict[str, Any] = {}
    exec(compile(program, "docs/guides/server.md", "exec"), names)
    prompt = list(range(22))
    first, _ = names["prefill"](prompt)
    names["scheduler"].drain()
    longer = [*prompt, 1, 2, 3, 4]
    copies.fail("onload", 2, OSError("lost"))
    again, reused = names["prefill"](longer)
    copies.heal()
    names["scheduler"].drain()
    assert reused == 0
    with names["manager"].lookup(names["manager"].block_hashes(longer)) as lease:
        assert lease.num_blocks == 5  # the sixth was computed from a prefix that was not there
    expected, reused = names["prefill"](longer)
    assert reused == 20
    assert np.allclose(again.numpy(), expected.numpy(), atol=1e-5)
    assert not np.allclose(first.numpy(), expected.numpy(), atol=1e-5)
    for name in ("manager", "scheduler", "pool"):
        names[name].close()


def test_pages_have_code() -> None:
    assert {"ordering.md", "offload.md", "guides/server.md"} <= set(map(name_of, WITH_CODE))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_sections_of_the_readme_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for heading in re.findall(r"^\{\{ README: (.+?) \}\}$", text, re.M):
        assert len(section_of_readme(heading)) > 100
    without_files(text, page)


def test_links_are_seen_from_where_they_are_used(tmp_path: Path) -> None:
    assert without_files("[a](ordering.md#x) [b](https://b.c/d)", DOCS / "design.md").startswith("[a](ordering.md#x)")
    assert without_files("[`setup`](../setup_ops.py), [m](measurements)", DOCS / "design.md") == "`setup`, `m`"
    with pytest.raises(ValueError, match=r"design\.md links to \.\./nothing\.py"):
        without_files("[x](../nothing.py)", DOCS / "design.md")
    with pytest.raises(ValueError, match="no heading"):
        section_of_readme("Nobody wrote this")


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    named |= set(re.findall(r"^  - [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert named == set(map(name_of, PAGES))


PUBLIC = [
    f"{module.__name__}.{name}"
    for module in (paddle_kv, paddle_kv.ops, paddle_kv.offload, paddle_kv.integrations)
    for name in module.__all__
]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_a_docstring_and_a_place_in_the_api_pages(name: str) -> None:
    module, _, last = name.rpartition(".")
    public = getattr(sys.modules[module], last)
    if inspect.ismodule(public) or isinstance(public, dict):
        return
    assert inspect.getdoc(public)
    pages = "".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    directives = re.findall(r"^::: (\S+)\n(?:    options:\n      members: \[(.*)\])?", pages, re.M)
    shown = {f"{path}.{member.strip()}" for path, members in directives for member in members.split(",")}
    whole = {path for path, members in directives if not members}
    place = f"{public.__module__}.{public.__name__}"
    assert {place, public.__module__} & whole or place in shown, f"{place} is on no page of docs/api"


def test_operators_have_an_example() -> None:
    assert [name for name in paddle_kv.ops.__all__ if ">>>" not in getattr(paddle_kv.ops, name).__doc__] == []
    guide = (DOCS / "guides" / "operators.md").read_text()
    assert [name for name in paddle_kv.ops.__all__ if name.removesuffix("_async") not in guide] == []
