"""Calls every public operator with random arguments on the CPU, sound and unsound ones.

    python tools/fuzz_ops.py [--count 200000] [--seed 0] [--json report.json]
    python tools/fuzz_ops.py --seed 0 --only 4711       # one call again, and what it was

Each call has to end in a typed error with nothing moved, or in the exact result of the NumPy references in
tests/reference. The calls run in a child process; where it dies, the report has the number of the call, and the rest
goes on in another child; --only prints the call before it makes it. Exit code 1 if anything was found.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHOWN_FINDINGS = 20


def work(seed: int, first: int, end: int) -> None:
    """In the child: one line of JSON before a call (its number) and one behind (what became of it)."""
    import warnings
    import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first

    warnings.simplefilter("ignore")
    told_to_parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between
    from tests.fuzz.one_call import run

    for index in range(first, end):
        print(index, file=told_to_parent, flush=True)
        verdict = run(seed, index)
        told = [verdict.op, verdict.kind, *([verdict.text] if verdict.wrong else [])]
        print(json.dumps(told), file=told_to_parent, flush=True)


def fuzz(seed: int, count: int) -> dict:
    """The report. Goes on behind a call that kills the child."""
    kinds: collections.Counter[str] = collections.Counter()
    per_op: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    findings: list[dict] = []
    next_index, started = 0, time.monotonic()
    while next_index < count:
        command = [sys.executable, __file__, "--seed", str(seed), "--work", str(next_index), str(count)]
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)
            running = None
            assert child.stdout is not None
            for line in child.stdout:
                if line[0] != "[":
                    running = int(line)
                    continue
                op, kind, *text = json.loads(line)
                kinds[kind] += 1
                per_op[op][kind] += 1
                if text:
                    findings.append({"index": running, "op": op, "kind": kind, "call": text[0]})
                next_index, running = running + 1, None
                if next_index % 5000 == 0:
                    rate = next_index / (time.monotonic() - started)
                    print(f"{next_index} calls, {rate:.0f} a second, {len(findings)} findings", flush=True)
            code = child.wait()
            errors.seek(0)
            last_words = errors.read()[-2000:]
        if next_index < count:
            if running is None:
                raise RuntimeError(f"the child ended before its first call: {last_words}")
            kinds["crash"] += 1
            findings.append({"index": running, "op": "?", "kind": "crash", "call": f"exit code {code}: {last_words}"})
            next_index = running + 1
    return {
        "seed": seed,
        "count": count,
        "seconds": time.monotonic() - started,
        "kinds": dict(kinds),
        "ops": {op: dict(of) for op, of in sorted(per_op.items())},
        "findings": findings,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", type=int, help="run one call in this process")
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count < 1:
        parser.error(f"argument --count: {options.count} must be at least 1")
    if options.work:
        work(options.seed, *options.work)
        return 0
    if options.only is not None:
        from tests.fuzz.one_call import run

        verdict = run(options.seed, options.only, lambda call: print(call, flush=True))
        print(verdict.kind, verdict.text)
        return int(verdict.wrong)
    report = fuzz(options.seed, options.count)
    for finding in report["findings"][:SHOWN_FINDINGS]:
        print(f"--seed {options.seed} --only {finding['index']}: {finding['kind']}: {finding['call']}")
    print(json.dumps(report["kinds"]), f"{len(report['findings'])} findings in {report['seconds']:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(report["findings"]))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
