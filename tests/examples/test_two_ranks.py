from __future__ import annotations

import pytest

from examples import two_ranks


def test_ranks_load_what_all_of_them_have_and_one_that_died_comes_back_empty() -> None:
    engine = two_ranks.main()
    assert engine.wrong == 0
    assert engine.loaded_blocks >= 12 * 7 + 5 * 3
    assert engine.directory.stats()["jobs_in_flight"] == 0


def test_the_same_over_zeromq_where_no_connection_tells_of_a_death() -> None:
    zmq = pytest.importorskip("zmq")
    from examples import two_ranks_zmq

    assert zmq.pyzmq_version()
    engine = two_ranks_zmq.main()
    assert engine.wrong == 0
    assert engine.recomputed_blocks == 7  # what rank 1 did not bring
    assert engine.loaded_blocks > 30
