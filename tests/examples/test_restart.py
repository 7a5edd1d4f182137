"""A server that is killed half-way: what it prints, and that it sees what goes wrong."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import restart

SMALL = ["--layers=2", "--conversations=2", "--turns=2", "--first-prompt=40", "--next-prompts=9", "--answer=2"]
EXAMPLE = Path(restart.__file__)
WAIT_S = 120.0


def test_conversations_come_back_from_the_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLE, *SMALL, f"--folder={tmp_path}"], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "README 1, turn 2: 32 tokens were not computed" in done.stdout
    assert "4 blocks came from the folder." in lines
    assert "All 8 generated tokens and the keys and values of all 6 blocks are identical." in lines


def serve(tmp_path, *more):
    options = restart.parse([*SMALL, f"--folder={tmp_path}", *more])
    state = tmp_path / "conversations.json"
    if not state.exists():
        state.write_text(json.dumps([asdict(one) for one in restart.split_texts(options)]))
    return restart.serve(options)


def test_nothing_from_the_folder_is_a_failure(tmp_path, capsys):
    assert serve(tmp_path, "--serve=2") == 1
    captured = capsys.readouterr()
    assert "0 blocks came from the folder." in captured.out
    assert captured.err == "FAILED\n  nothing came from the folder\n"


def test_a_changed_byte_is_found(tmp_path, monkeypatch, capsys):
    original = restart.Server.turn

    def turn(server, conversation, answer_tokens):
        reused = original(server, conversation, answer_tokens)
        if conversation.name == "README 1":
            with server.pool.lease([0], write=True):
                server.pool.view("value", 1, 0)[3, 5, 40] += 1.0
        return reused

    monkeypatch.setattr(restart.Server, "turn", turn)
    assert serve(tmp_path, "--serve=2") == 1
    found = capsys.readouterr().err
    assert "README 1: value of layer 1 differs" in found
    assert "LICENSE" not in found
