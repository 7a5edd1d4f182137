from __future__ import annotations

from examples import two_ranks


def test_ranks_load_what_all_of_them_have_and_one_that_died_comes_back_empty() -> None:
    engine = two_ranks.main()
    assert engine.wrong == 0
    assert engine.loaded_blocks >= 12 * 7 + 5 * 3
    assert engine.directory.stats()["jobs_in_flight"] == 0
