"""The demo on small sizes: what it prints and writes, and that it sees what goes wrong."""

import collections
import csv
import json
import threading
import time

import demo
import pytest
from serving import DeviceBlocks, Server

from paddle_kv import Transfer
from paddle_kv.backend import cpu_backend
from paddle_kv.schedule.trace import read_trace

SMALL = ["--layers=2", "--conversations=3", "--turns=3", "--first-prompt=37", "--next-prompts=9", "--answer=4"]
LAYER_DELAY_S = 0.05
WAIT_S = 20.0


def run(tmp_path, *more):
    return demo.main([*SMALL, f"--out={tmp_path}", f"--json={tmp_path / 'turns.json'}", *more])


def test_result_table_and_files(tmp_path, capsys):
    assert run(tmp_path, f"--csv={tmp_path / 'turns.csv'}") == 0
    printed = capsys.readouterr().out
    assert "All 36 generated tokens and the keys and values of all 198 cached tokens are identical." in printed
    result = json.loads((tmp_path / "turns.json").read_text())
    assert result["identical"] and result["differences"] == []
    names = ["README 1", "LICENSE 1", "README 2"]
    assert [(row["conversation"], row["turn"]) for row in result["turns"]] == [(n, t) for t in (1, 2, 3) for n in names]
    block_bytes = 2 * 2 * 4 * 64 * 16 * 4  # layers, key and value, heads, head size, tokens, bytes of a float
    for row in result["turns"]:
        first = row["turn"] == 1
        cached = {1: 0, 2: 40, 3: 53}[row["turn"]]
        assert (row["reused_tokens"], row["new_tokens"]) == (cached, 41 if first else 14)
        assert row["onload_bytes"] == -(-cached // 16) * block_bytes
        # Everything from the block on in which the prefix ends is new.
        assert row["offload_bytes"] == (-(-(cached + (40 if first else 13)) // 16) - cached // 16) * block_bytes
        assert 0.0 <= row["hidden_ms"] <= row["moving_ms"]
        assert row["waited_ms"] >= 0.0
    with (tmp_path / "turns.csv").open() as file:
        assert [row["onload_bytes"] for row in csv.DictReader(file)] == [
            str(r["onload_bytes"]) for r in result["turns"]
        ]
    assert (tmp_path / "demo_timeline.png").stat().st_size > 10_000
    # The prompt of the last turn fills no block: nothing is offloaded beside it.
    assert {span.lane for span in read_trace(tmp_path / "demo_timeline.json")} == {"onload", "compute", "wait"}


def test_the_texts_are_served_from_both_ends(tmp_path, capsys):
    assert run(tmp_path, "--chunk-tokens=16") == 0
    assert "Prompt 3: of 48 tokens that were found" in capsys.readouterr().out


def test_table_without_rich(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rich", None)
    demo.print_table([demo.Row("README 1", 2, 640, 56, 3 * 2**20, 2**20, 0.25, 4.0, 3.5)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split("  ")[0].strip() == "conversation"
    assert lines[2].split() == ["README", "1", "2", "640", "56", "3.0", "1.0", "0.2", "4.0", "3.5"]


def test_a_changed_byte_in_host_memory_is_found(tmp_path, monkeypatch, capsys):
    original = Server.turn

    def turn(server, conversation, answer_tokens):
        done = original(server, conversation, answer_tokens)
        if (done.conversation, done.number) == ("LICENSE 1", 1):
            block_id = conversation.host_blocks[0]
            with server.host.lease([block_id], write=True):
                server.host.view("value", 1, block_id)[3, 5, 40] += 1.0
        return done

    monkeypatch.setattr(Server, "turn", turn)
    assert run(tmp_path) == 1
    assert "FAILED\n" in capsys.readouterr().err
    found = json.loads((tmp_path / "turns.json").read_text())["differences"]
    assert any("LICENSE 1: value of layer 1 differs" in line for line in found)
    assert not any("README" in line for line in found)


def test_debug_mode_has_nothing_to_report(tmp_path, monkeypatch):
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    assert run(tmp_path) == 0


@pytest.fixture
def late_loads(monkeypatch):
    """The copies of a load start late: some time after somebody has begun to wait for it. Those that have started."""
    asked, started = collections.defaultdict(threading.Event), set()
    copy = cpu_backend._copy

    def note_who_is_asked(name):
        original = getattr(Transfer, name)

        def noted(transfer, *arguments, **named):
            asked[transfer.plan].set()
            return original(transfer, *arguments, **named)

        monkeypatch.setattr(Transfer, name, noted)

    def late_copy(binding, task, stream):
        work = task.work
        if work.plan.direction == "onload" and work.plan not in started:
            assert asked[work.plan].wait(WAIT_S)
            time.sleep(LAYER_DELAY_S)
            started.add(work.plan)
        copy(binding, task, stream)

    monkeypatch.setattr(cpu_backend, "_copy", late_copy)
    note_who_is_asked("wait")
    note_who_is_asked("wait_layer")
    return started


def test_late_layers_are_waited_for(tmp_path, late_loads):
    assert run(tmp_path) == 0
    turns = json.loads((tmp_path / "turns.json").read_text())["turns"]
    assert len(late_loads) == 6 + 3  # of the second and third turns, and for the comparison
    assert sum(row["waited_ms"] for row in turns) > 6 * 1000 * LAYER_DELAY_S


def test_a_forgotten_wait_is_found(tmp_path, late_loads, monkeypatch):
    monkeypatch.setattr(Transfer, "wait_layer", lambda transfer, layer, **_: None)
    assert run(tmp_path) == 1
    assert len(late_loads) == 6 + 3


class Offload:
    def __init__(self, log):
        self.log = log

    def wait_on(self):
        self.log.append(self)


def test_device_blocks_are_given_out_behind_the_offloads_that_read_them():
    waited = []
    first, second = Offload(waited), Offload(waited)
    blocks = DeviceBlocks(6)
    assert blocks.allocate(4) == [0, 1, 2, 3]
    blocks.release([3, 1], [first, second])
    blocks.release([0], [])
    assert blocks.allocate(2) == [4, 5]
    assert waited == []
    assert blocks.allocate(2) == [3, 1]
    assert waited == [first, second]
    with pytest.raises(MemoryError, match="2 device blocks asked for, 1 free"):
        blocks.allocate(2)
    assert blocks.allocate(1) == [0]
