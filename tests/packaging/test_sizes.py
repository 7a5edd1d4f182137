"""Small files with one job: none of the package or of the kernels has more than 500 lines."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 500


def test_no_source_is_long() -> None:
    sources = [
        path
        for folder in ("paddle_kv", "custom_ops")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".h", ".cuh", ".cc", ".cu"}
    ]
    assert len(sources) > 400
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES} == {}
