"""Messages and grants as they travel: what is taken, to the byte, and what is said of the rest."""

from __future__ import annotations

import json
import logging
import math
import zlib
from dataclasses import fields, replace
from typing import Any

import pytest

from paddle_kv.peers import Grant
from paddle_kv.peers.grant import VERSION, check_grant, is_grant_id, make_grant_id
from paddle_kv.peers.messages import TO_RECEIVER, TO_SENDER, decode, encode, heard

MOST_BYTES, MOST_REASON_CHARACTERS = 4096, 200
ID, BEGIN_ID = "0123456789abcdef" * 2, "fedcba9876543210" * 2
KINDS: dict[str, dict[str, type]] = {"plain": {}, "some": {"text": str, "number": int}}


def sealed(text: str) -> bytes:
    data = text.encode()
    return b"%08x" % zlib.crc32(data) + data


# ---- messages ----
def test_a_message_to_the_byte() -> None:
    expected = sealed('{"kind":"layers","grant_id":"' + ID + '","begin_id":"' + BEGIN_ID + '","first":0,"end":2}')
    assert encode("layers", ID, BEGIN_ID, first=0, end=2) == expected
    names = {"grant_id": ID, "begin_id": BEGIN_ID}
    assert decode(expected, TO_RECEIVER) == {"kind": "layers", **names, "first": 0, "end": 2}
    for kinds in (TO_RECEIVER, TO_SENDER):
        for kind, fields_of_kind in kinds.items():
            values = {name: of(1) for name, of in fields_of_kind.items()}
            assert decode(encode(kind, ID, BEGIN_ID, **values), kinds) == {"kind": kind, **names, **values}


def test_a_long_reason_is_cut_and_a_long_message_is_none() -> None:
    for length in (MOST_REASON_CHARACTERS, MOST_REASON_CHARACTERS + 1):
        found = decode(encode("refused", ID, BEGIN_ID, reason="x" * length), TO_SENDER)
        assert found["reason"] == "x" * MOST_REASON_CHARACTERS
    empty = len(encode("some", ID, BEGIN_ID, text="", number=1))
    assert decode(encode("some", ID, BEGIN_ID, text="x" * (MOST_BYTES - empty), number=1), KINDS)["number"] == 1
    with pytest.raises(ValueError, match=f"no bytes, or more than {MOST_BYTES}"):
        decode(encode("some", ID, BEGIN_ID, text="x" * (MOST_BYTES - empty + 1), number=1), KINDS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "no bytes"),
        ("", "no bytes"),
        (bytearray(encode("plain", ID, BEGIN_ID)), "no bytes"),
        (b"", "not what was sent"),
        (encode("plain", ID, BEGIN_ID)[:-1], "not what was sent"),
        (encode("plain", ID, BEGIN_ID).upper(), "not what was sent"),
        (sealed("{"), "no JSON"),
        (sealed("[" * 3000), "no JSON"),
        (sealed('"kind"'), "no message of a known kind"),
        (sealed('["kind"]'), "no message of a known kind"),
        (sealed("{}"), "no message of a known kind"),
        (sealed('{"kind":["plain"],"grant_id":"' + ID + '"}'), "no message of a known kind"),
        (encode("other", ID, BEGIN_ID), "no message of a known kind"),
        (sealed('{"kind":"plain"}'), "not the fields of the message"),
        (encode("plain", ID, BEGIN_ID, more=1), "not the fields of the message"),
        (encode("some", ID, BEGIN_ID, text="x"), "not the fields of the message"),
        (encode("plain", ID[1:], BEGIN_ID), "not the fields of the message"),
        (sealed('{"kind":"plain","grant_id":"' + ID + '"}'), "not the fields of the message"),
        (encode("plain", ID, ""), "not the fields of the message"),
        (encode("plain", ID, BEGIN_ID[1:]), "not the fields of the message"),
        (encode("plain", ID, BEGIN_ID.upper()), "not the fields of the message"),
        (encode("plain", ID, 7), "a field of the wrong type"),  # type: ignore[arg-type]
        (encode("some", ID, BEGIN_ID, text=1, number=1), "a field of the wrong type"),
        (encode("some", ID, BEGIN_ID, text="x", number=True), "a field of the wrong type"),
    ],
)
def test_what_is_no_message_is_refused_and_logged(data: Any, message: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=message):
        decode(data, KINDS)
    caplog.set_level(logging.DEBUG)
    assert heard(data, KINDS) is None
    [record] = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.getMessage().startswith(f"a message was refused: {message}")


def test_what_is_heard() -> None:
    assert heard(encode("plain", ID, BEGIN_ID), KINDS) == {"kind": "plain", "grant_id": ID, "begin_id": BEGIN_ID}


# ---- grants ----
def made(**changes: Any) -> Grant:
    values = {
        "version": VERSION,
        "grant_id": ID,
        "pool_id": "pool",
        "host_block_ids": (4, 0),
        "num_layers": 1,
        "first_head": 0,
        "num_heads": 1,
        "deadline_s": 2.5,
    }
    return replace(Grant(**{field.name: values[field.name] for field in fields(Grant)}), **changes)  # type: ignore[arg-type]


def test_a_grant_on_its_way() -> None:
    grant = made()
    check_grant(grant)
    text = grant.to_json()
    assert text == json.dumps(json.loads(text), separators=(",", ":"))
    for one in (text, text.encode()):
        assert Grant.from_json(one) == grant
    digests = {grant.digest, *(made(**change).digest for change in ({"host_block_ids": (0, 4)}, {"deadline_s": 2.25}))}
    assert len(digests) == 3 and {len(digest) for digest in digests} == {64}
    assert grant.digest == made().digest


def test_the_number_of_a_grant() -> None:
    numbers = {make_grant_id() for _ in range(50)}
    assert len(numbers) == 50 and all(is_grant_id(number) and len(number) == 32 for number in numbers)
    for wrong in (None, 5, ID[1:], ID + "0", ID.upper(), ID[:-1] + "g", ID.encode(), list(ID)):
        assert is_grant_id(wrong) is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": VERSION + 1}, rf"has version {VERSION + 1}; this process knows version {VERSION}"),
        ({"version": float(VERSION)}, r"has version .*\.0; this process knows"),
        ({"grant_id": "x"}, "grant_id = 'x' must be 32 hexadecimal digits"),
        ({"pool_id": 5}, "pool_id = 5 must be a string"),
        ({"host_block_ids": ()}, "host_block_ids must be"),
        ({"host_block_ids": 4}, "host_block_ids must be"),
        ({"host_block_ids": "45"}, "host_block_ids must be"),
        ({"host_block_ids": (4, -1)}, "host_block_ids must be"),
        ({"host_block_ids": (True,)}, "host_block_ids must be"),
        ({"host_block_ids": (1.0,)}, "host_block_ids must be"),
        ({"num_layers": 0}, "num_layers = 0 must be"),
        ({"num_layers": True}, "num_layers = True must be"),
        ({"num_layers": 2.0}, r"num_layers = 2\.0 must be"),
        ({"deadline_s": 1}, "deadline_s = 1 must be a time"),
        ({"deadline_s": math.inf}, "deadline_s = inf must be a time"),
    ],
)
def test_a_part_of_a_grant_that_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_grant(made(**changes))
    if "host_block_ids" not in changes or isinstance(changes["host_block_ids"], tuple):
        with pytest.raises(ValueError, match=message):
            Grant.from_json(made(**changes).to_json())


def test_a_list_of_blocks_is_no_tuple_but_in_json() -> None:
    with pytest.raises(ValueError, match="host_block_ids must be a tuple"):
        check_grant(made(host_block_ids=[4, 0]))


@pytest.mark.parametrize("wrong", [None, "grant", {"version": VERSION}])
def test_what_is_no_grant(wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"grant is {type(wrong).__name__}; what Receiver.grant\(\) returned"):
        check_grant(wrong)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the text is not the JSON of a grant"),
        (None, "the text is not the JSON of a grant"),
        ("[" * 100_000, "the text is not the JSON of a grant"),
        ("5", "the text does not have the fields of a grant"),
        (json.dumps([field.name for field in fields(Grant)]), "the text does not have the fields of a grant"),
        ("{}", "the text does not have the fields of a grant"),
        (made().to_json()[:-1] + ',"more":1}', "the text does not have the fields of a grant"),
    ],
)
def test_a_text_that_is_no_grant(text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grant.from_json(text)
