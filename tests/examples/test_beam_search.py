"""The example's own check, and that it sees a copy that is missing."""

import subprocess
import sys
from pathlib import Path

import beam_search
import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "beam_search.py"


def run(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["beam_search.py", *options])
    return beam_search.main()


def test_as_a_script():
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 beams, 24 steps" in done.stdout


@pytest.mark.parametrize(("beams", "block_size"), [(1, 16), (3, 1), (5, 7), (4, 128)])
def test_numbers_of_beams_and_block_sizes(monkeypatch, capsys, beams, block_size):
    assert run(monkeypatch, f"--beams={beams}", f"--block-size={block_size}", "--steps=9") == 0
    output = capsys.readouterr().out
    copied = int(output.split("copied before writing: ")[1].split()[0])
    assert (copied > 0) == (beams > 1 and block_size > 1)


@pytest.mark.parametrize("operator", ["copy_blocks", "reshape_and_cache"])
def test_a_missing_operation_is_noticed(monkeypatch, capsys, operator):
    real, calls = getattr(beam_search.ops, operator), []

    def forgets_the_sixth(*arguments):
        calls.append(arguments)
        if len(calls) != 6:
            real(*arguments)

    monkeypatch.setattr(beam_search.ops, operator, forgets_the_sixth)
    assert run(monkeypatch, "--steps=9") == 1
    assert "wrong: the attention of a beam differs" in capsys.readouterr().out


def test_references():
    blocks = beam_search.Blocks(3)
    first = blocks.take()
    blocks.share([first, first])
    blocks.release([first])
    assert (blocks.used, blocks.references[first]) == (1, 2)
    blocks.release([first, first])
    assert (blocks.used, blocks.most_used) == (0, 1)
