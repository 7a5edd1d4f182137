"""Prefill and decode as two processes: that all is handed over, and that the example sees what goes wrong."""

from __future__ import annotations

import prefill_decode
import pytest

SMALL = ["--layers=2", "--prompts=3", "--prompt=40", "--answer=3"]


def test_all_tokens_are_those_of_a_single_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert prefill_decode.main([*SMALL, "--direct"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 prompts go from a prefill to a decode process, straight into the other cache."
    assert lines[-1].startswith("All 9 tokens and the keys and values of all 87 cached tokens are those of a single")
    assert [" ".join(line.split()[:5]) for line in lines[1:4]] == [
        "prompt 1: 40 tokens handed",
        "prompt 2: 27 tokens handed",
        "prompt 3: 14 tokens handed",
    ]


def test_a_changed_byte_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = prefill_decode.Decoder.serve

    def serve(decoder: prefill_decode.Decoder, requests: list[prefill_decode.Request], answer_tokens: int) -> None:
        original(decoder, requests, answer_tokens)
        decoder.cache.tensor("value", 1)[requests[1].table[0], 3, 5, 40] += 1.0

    monkeypatch.setattr(prefill_decode.Decoder, "serve", serve)
    assert prefill_decode.main(SMALL) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("FAILED\n  prompt 2: value of layer 1 differs in ")
    assert len(captured.err.splitlines()) == 2
    assert captured.out.count("handed over, the model waited") == 3


def test_prompts_of_a_process_that_is_killed_are_computed_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = prefill_decode.Decoder.answer

    def answer(decoder: prefill_decode.Decoder, request: prefill_decode.Request, answer_tokens: int) -> None:
        if request.name == "prompt 2":
            decoder.prefill.process.kill()
            decoder.prefill.process.join()
        original(decoder, request, answer_tokens)

    monkeypatch.setattr(prefill_decode.PrefillProcess, "ask", _first_only(prefill_decode.PrefillProcess.ask))
    monkeypatch.setattr(prefill_decode.Decoder, "answer", answer)
    assert prefill_decode.main(SMALL) == 1
    captured = capsys.readouterr()
    assert captured.err == "FAILED\n  prompt 2 was not handed over\n  prompt 3 was not handed over\n"
    assert captured.out.count("handed over, the model waited") == 1


def _first_only(ask):  # type: ignore[no-untyped-def]
    """The process is told of the first prompt alone: it dies before it begins another one."""
    asked = []

    def first_only(process, grant, tokens):  # type: ignore[no-untyped-def]
        if not asked:
            ask(process, grant, tokens)
        asked.append(grant)

    return first_only
