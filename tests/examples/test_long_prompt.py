"""A text that does not fit on the device: what is printed, and that it sees what goes wrong."""

import json
import subprocess
import sys
from pathlib import Path

import long_prompt
import pytest
from model import Model, ModelConfig

EXAMPLE = Path(long_prompt.__file__)
WAIT_S = 120.0


def test_four_times_what_the_device_holds(tmp_path):
    result = tmp_path / "result.json"
    small = ["--prompt=300", "--chunk-tokens=90", "--answer=5", f"--json={result}"]
    done = subprocess.run([sys.executable, EXAMPLE, *small], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert "All 5 generated tokens and the keys and values of all 304 cached tokens are identical." in done.stdout
    found = json.loads(result.read_text())
    assert found["context_bytes"] == 4 * found["device_bytes"] and found["identical"]
    assert [one["start"] for one in found["passes"]] == [0, 90, 180, 270, 300, 301, 302, 303]


@pytest.mark.parametrize("layer_buffers", [2, 3, 4])
def test_any_number_of_buffers(layer_buffers):
    text = long_prompt.LongText(Model(ModelConfig(num_layers=4)), 60, layer_buffers)
    long_prompt.serve(text, bytes(range(50)), chunk_tokens=23, answer_tokens=3)
    assert not list(text.differences())
    text.close()


def test_what_differs_is_told():
    text = long_prompt.LongText(Model(ModelConfig(num_layers=4)), 60, 2)
    long_prompt.serve(text, bytes(range(50)), chunk_tokens=23, answer_tokens=2)
    text.passes[1].prediction += 1
    text.host.view("value", 2, 1)[0, 5, 0] += 1.0
    told = list(text.differences())
    assert [line.partition(" is ")[0] for line in told[:1]] == ["the token behind pass 1"]
    assert told[1:] and all(line.startswith("value of layer 2 differs in ") for line in told[1:])
    text.close()
