"""Lists each registered operator with the files that belong to it, and finds those that are missing.

    python3 tools/gen_op_index.py            print the table
    python3 tools/gen_op_index.py --check    fail when a file is missing or docs/ops.md is out of date
    python3 tools/gen_op_index.py --write    write docs/ops.md

An operator called X of a family F is registered in custom_ops/ops/F/, the Python function X is in paddle_kv/ops/F.py,
its NumPy reference in tests/reference/F.py. Header, kernel and CPU twin are called X too, or are those that the glue
includes, where several operators share a kernel.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "ops.md"
COLUMNS = ("glue", "header", "kernel", "CPU twin", "Python", "reference", "test")

# Variants that share every file with the operator whose name remains without the suffix.
VARIANT_SUFFIXES = ("_async", "_in_place", "_into")

# Operators that tell something about the build or the machine, or note something: neither kernel nor reference.
QUERIES = (
    "build_info",
    "cuda_version",
    "device_of_pointers",
    "has_memcpy_batch_async",
    "register_transfer_plan",
    "release_transfer_plan",
)
# Operators for caches in RAM alone.
CPU_ONLY = ("transfer_layers",)
# Operators that have no public function of their own: steps of other functions, and tested with them.
STEPS = ("cuda_version", "device_of_pointers", "new_tensor")
NOT_APPLICABLE = ""


def registered() -> dict[str, Path]:
    """Operator (without variants) -> the file that registers it."""
    found = {}
    for glue in sorted((ROOT / "custom_ops" / "ops").rglob("*.cc")):
        for name in re.findall(r"^PD_BUILD_STATIC_OP\(paddle_kv_(\w+)\)", glue.read_text(), re.M):
            found[name] = glue
    variants = {base + suffix for base in found for suffix in VARIANT_SUFFIXES}
    return {name: glue for name, glue in found.items() if name not in variants}


def files_of(name: str, glue: Path) -> dict[str, str | None]:
    """Column -> path, None where there is none that should be."""
    family = glue.parent.name
    include, kernels = f"custom_ops/include/paddle_kv/{family}", f"custom_ops/kernels/{family}"
    shared = [name, *kernels_included_by(glue)]
    python, references, tests = python_in("paddle_kv"), python_in("tests/reference"), python_in("tests/ops", "tests")
    paths = {
        "glue": str(glue.relative_to(ROOT)),
        "header": first(f"{include}/{kernel}.h" for kernel in shared),
        "kernel": first(f"{kernels}/{kernel}.cu" for kernel in shared),
        "CPU twin": first(f"{kernels}/{kernel}_cpu.cc" for kernel in shared),
        "Python": first([f"paddle_kv/ops/{family}.py", *python], mentioning=name),
        "reference": first([f"tests/reference/{family}.py"]) or first(references, mentioning=name),
        "test": first([f"tests/ops/test_{name}.py"]) or first(tests, mentioning=name),
    }
    if name in (*QUERIES, *STEPS):
        paths |= dict.fromkeys(("header", "kernel", "CPU twin", "reference"), NOT_APPLICABLE)
    if name in CPU_ONLY:
        paths["kernel"] = NOT_APPLICABLE
    if name in STEPS:
        paths["test"] = NOT_APPLICABLE
    return paths


def kernels_included_by(glue: Path) -> list[str]:
    """Names of the kernels whose headers the glue includes, the nearest first."""
    family, found, queue = glue.parent.name, [], [glue]
    for file in queue:  # grows
        includes = re.findall(r'^#include "(.+)"', file.read_text(), re.M)
        found += [Path(path).stem for path in includes if path.startswith(f"paddle_kv/{family}/")]
        local = [glue.parent / path for path in includes if "/" not in path]
        parts = [part for header in local for part in (header, header.with_suffix(".cc"))]
        queue += [part for part in parts if part.exists() and part not in queue]
    return [name for name in found if (ROOT / "custom_ops" / "kernels" / family / f"{name}.cu").exists()]


def python_in(*folders: str) -> list[str]:
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [str(path.relative_to(ROOT)) for path in found if "gpu" not in path.parts]


def first(paths: Iterable[str], mentioning: str = "") -> str | None:
    """The first of the paths that exists (and has the word in it)."""
    word = re.compile(rf"\b{mentioning}({'|'.join(VARIANT_SUFFIXES)})?\b")
    for path in paths:
        file = ROOT / path
        if file.exists() and (not mentioning or word.search(file.read_text())):
            return path
    return None


def table(rows: dict[str, dict[str, str | None]]) -> str:
    lines = [
        "# Operators and their files",
        "",
        "For those who work on the operators; those without a kernel are used by the package only. Which operator does "
        "what: [guides/operators.md](guides/operators.md).",
        "",
        "Written by `python3 tools/gen_op_index.py --write`.",
        "",
        f"| operator | {' | '.join(COLUMNS)} |",
        "| --- " * (len(COLUMNS) + 1) + "|",
    ]
    for name, files in sorted(rows.items()):
        cells = [cell(path) for path in files.values()]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(path: str | None) -> str:
    if path is None:
        return "**missing**"
    return f"[{Path(path).name}](../{path})" if path else ""


def main() -> None:
    rows = {name: files_of(name, glue) for name, glue in registered().items()}
    page = table(rows)
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page)
    elif sys.argv[1:] == ["--check"]:
        missing = [
            f"{name}: no {column}" for name, files in rows.items() for column, path in files.items() if path is None
        ]
        if not missing and (not PAGE.exists() or PAGE.read_text() != page):
            missing = ["docs/ops.md is out of date: python3 tools/gen_op_index.py --write"]
        if missing:
            sys.exit("\n".join(missing))
        print(f"{len(rows)} operators, each with all its files")
    else:
        print(page, end="")


if __name__ == "__main__":
    main()
