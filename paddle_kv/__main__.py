"""``python -m paddle_kv``: the command ``paddle-kv`` of a package that is built in place and not installed."""

from __future__ import annotations

from .cli.main import app

app(prog_name="python -m paddle_kv")
