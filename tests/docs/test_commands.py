"""The page of the commands names every command and option, and their defaults as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.main import get_command

from paddle_kv.cli.main import app

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text()
ROOT = PAGE.partition("\n## ")[0]


def commands(command: Any = None, name: str = "paddle-kv") -> Iterator[tuple[str, Any]]:
    command = get_command(app) if command is None else command
    yield name, command
    for inner, each in getattr(command, "commands", {}).items():
        yield from commands(each, f"{name} {inner}")


COMMANDS = dict(commands())


def part_of(name: str) -> str:
    """What the page says below the heading of a command; of one without a heading, all."""
    found = re.search(rf"^## `{name}`$(.*?)(?=^## |\Z)", PAGE, re.S | re.M)
    return found[1] if found else PAGE


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in ROOT or name == "paddle-kv"
    for option in COMMANDS[name].params:
        for text in option.opts:
            assert not text.startswith("--") or re.search(rf"(?<![\w-]){text}(?![\w-])", part_of(name)), text


@pytest.mark.parametrize("name", ["paddle-kv bench", "paddle-kv replay", "paddle-kv soak"])
def test_what_the_page_names_is_there_with_its_default(name: str) -> None:
    options = {text: option for option in COMMANDS[name].params for text in option.opts}
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", part_of(name), re.M)
    assert len(rows) > 5
    for named, said in rows:
        texts = re.findall(r"`(--[\w-]+)`", named)
        assert set(texts) <= set(options)
        given = said.replace("`", "").split(", ")
        if len(given) == len(texts):  # else it is a sentence
            for text, one in zip(texts, given, strict=True):
                default = options[text].default
                assert not re.fullmatch(r"[\d.]+", one) or float(one) == float(unlisted(default)), (text, one)


def unlisted(default: Any) -> Any:
    return default[0] if isinstance(default, (list, tuple)) else default
