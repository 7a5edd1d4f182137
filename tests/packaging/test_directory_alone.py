"""The scheduling process of a server imports a directory and nothing heavy."""

from __future__ import annotations

import subprocess
import sys

LONGEST_S = 0.2

PROGRAM = """
import sys, time
begun_s = time.process_time()
from paddle_kv.offload import Directory, Hello
took_s = time.process_time() - begun_s
directory = Directory(64)  # a policy that learns
directory.join(Hello(0, 1, 64))
for number in range(200):
    keys = [b"%d-%d" % (number, position) for position in range(4)]
    directory.lookup(keys).release()
    directory.plan_save(keys, [0, 1, 2, 3])
assert not {"paddle", "numpy"} & sys.modules.keys(), sorted(sys.modules)
from paddle_kv.offload.score import FIT_EVERY, Score
score = Score()
for number in range(FIT_EVERY):
    score.learn(Score.facts(1, 1 + number % 7, 0, 0.0), 1, number % 2 == 0, 0.0)
score.fit(1e6)
assert "numpy" in sys.modules and "paddle" not in sys.modules
print(took_s)
"""


def test_a_directory_needs_no_paddle_and_no_numpy_before_it_learns() -> None:
    seconds = []
    for _ in range(3):
        ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        seconds.append(float(ran.stdout))
    assert min(seconds) < LONGEST_S
