"""Lists each registered operator with the files that belong to it, and finds those that are missing.

    python3 tools/gen_op_index.py            print the table
    python3 tools/gen_op_index.py --check    fail when a file is missing or docs/ops.md is out of date
    python3 tools/gen_op_index.py --write    write docs/ops.md

An operator called X of a family F is registered in custom_ops/ops/F/; its header, kernel and CPU twin are called X, the
Python function X is in paddle_kv/ops/F.py, its NumPy reference in tests/reference/F.py. The tables below name what
deviates.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "ops.md"
COLUMNS = ("glue", "header", "kernel", "CPU twin", "Python", "reference", "test")

# Variants that share every file with the operator whose name remains without the suffix.
VARIANT_SUFFIXES = ("_async", "_in_place")

# Operators that run the kernel of another one.
KERNEL_OF = {
    "swap_cache_per_layer": "transfer_blocks",
    "swap_cache_all_layers": "transfer_blocks",
    "register_transfer_plan": "transfer_layers",
    "release_transfer_plan": "transfer_layers",
}

# Operators behind the scheduler, without a public function or reference of their own: (Python, reference, test).
SCHEDULER_OPERATORS = {
    name: ("paddle_kv/backend/binding.py", "tests/reference/swap.py", "tests/schedule/test_scheduler.py")
    for name in ("register_transfer_plan", "release_transfer_plan", "transfer_layers")
}


def registered() -> dict[str, Path]:
    """Operator (without variants) -> the file that registers it."""
    found = {}
    for glue in sorted((ROOT / "custom_ops" / "ops").rglob("*.cc")):
        for name in re.findall(r"^PD_BUILD_STATIC_OP\(paddle_kv_(\w+)\)", glue.read_text(), re.M):
            for suffix in VARIANT_SUFFIXES:
                name = name.removesuffix(suffix)
            found[name] = glue
    return found


def files_of(name: str, glue: Path) -> dict[str, str | None]:
    """Column -> path, None where the file (or what should be in it) is missing."""
    family = glue.parent.name
    kernel = KERNEL_OF.get(name, name)
    python = f"paddle_kv/ops/{family}.py"
    reference = f"tests/reference/{family}.py"
    test = test_of(name)
    if name in SCHEDULER_OPERATORS:
        python, reference, test = SCHEDULER_OPERATORS[name]
    paths = (
        str(glue.relative_to(ROOT)),
        f"custom_ops/include/paddle_kv/{family}/{kernel}.h",
        f"custom_ops/kernels/{family}/{kernel}.cu",
        f"custom_ops/kernels/{family}/{kernel}_cpu.cc",
        python if mentions(python, name) else None,
        reference,
        test,
    )
    return {
        column: path if path and (ROOT / path).exists() else None for column, path in zip(COLUMNS, paths, strict=True)
    }


def test_of(name: str) -> str | None:
    """The test called after the operator, else the first that mentions it."""
    tests = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "gpu" not in path.parts)
    tests.sort(key=lambda path: path.stem != f"test_{name}")
    found = (str(path.relative_to(ROOT)) for path in tests)
    return next((path for path in found if mentions(path, name)), None)


def mentions(path: str, name: str) -> bool:
    file = ROOT / path
    return file.exists() and re.search(rf"\b{name}\b", file.read_text()) is not None


def table(rows: dict[str, dict[str, str | None]]) -> str:
    lines = [
        "# Operators and their files",
        "",
        "Written by `python3 tools/gen_op_index.py --write`.",
        "",
        f"| operator | {' | '.join(COLUMNS)} |",
        "| --- " * (len(COLUMNS) + 1) + "|",
    ]
    for name, files in sorted(rows.items()):
        cells = [f"[{Path(path).name}](../{path})" if path else "**missing**" for path in files.values()]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = {name: files_of(name, glue) for name, glue in registered().items()}
    page = table(rows)
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page)
    elif sys.argv[1:] == ["--check"]:
        missing = [f"{name}: no {column}" for name, files in rows.items() for column, path in files.items() if not path]
        if not missing and (not PAGE.exists() or PAGE.read_text() != page):
            missing = ["docs/ops.md is out of date: python3 tools/gen_op_index.py --write"]
        if missing:
            sys.exit("\n".join(missing))
        print(f"{len(rows)} operators, each with all its files")
    else:
        print(page, end="")


if __name__ == "__main__":
    main()
