import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k3jax.chat.deltas import join
from k3jax.chat.detokenizer import Detokenizer
from k3jax.chat.parser import Parser
from tests.conftest import DATA

CASES = [json.loads(line) for line in (DATA / "cases" / "detokenizer_bytes.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_public_reports(case):
    pieces = [bytes.fromhex(piece) for piece in case["pieces_hex"]]
    detokenizer = Detokenizer(pieces.__getitem__)
    deltas = [*(detokenizer.feed(id) for id in range(len(pieces))), detokenizer.finish()]
    text = b"".join(pieces).decode("utf-8", "replace")
    assert "".join(deltas) == text
    if "expect_text" in case:
        assert text == case["expect_text"]
    else:
        parser = Parser(thinking=True)
        message = join([delta for text in deltas for delta in parser.feed(text)] + parser.finish())
        assert (message.reasoning, message.content) == (case["expect_reasoning"], case["expect_content"])
    if case["id"] in ("DT-04", "DT-05"):  # written by the model, never valid: sent with their own piece
        assert deltas == [case["expect_text"][0], "\ufffd", *case["expect_text"][2:], ""]
    else:
        assert "\ufffd" not in "".join(deltas[:-1])


BYTES = st.binary(max_size=12) | st.text(max_size=6).map(str.encode)


@given(st.lists(BYTES, max_size=8))
@example([b"\xf0\x9f", b"\x91", b"A"])
@example([b"\xed", b"\xa0", b"\x80"])  # a surrogate
@example([b"\xf4\x8f\xbf", b"\xf4"])
def test_holds_back_nothing_but_an_unfinished_character(pieces):
    detokenizer = Detokenizer(lambda id: b"")
    text, data = "", b""
    for piece in pieces:
        text += detokenizer.feed(piece)
        data += piece
        held = max(size for size in range(4) if size <= len(data) and is_begun(data[len(data) - size :]))
        assert text == data[: len(data) - held].decode("utf-8", "replace")
    assert text + detokenizer.finish() == data.decode("utf-8", "replace")


def is_begun(data: bytes) -> bool:
    """Whether more bytes may make it one character. The decoder awaits the third byte of a surrogate too."""
    return not data or any(
        is_character(data + fill + b"\x80" * more) for fill in (b"\x80", b"\x90", b"\xa0") for more in range(3)
    )


def is_character(data: bytes) -> bool:
    try:
        return len(data.decode("utf-8", "surrogatepass")) == 1
    except UnicodeDecodeError:
        return False


def test_an_unfinished_character_is_given_up_before_a_control_token():
    detokenizer = Detokenizer({0: b"a\xe4", 1: b"\xbd\xa0"}.__getitem__)
    assert [detokenizer.feed(0), detokenizer.finish()] == ["a", "\ufffd"]
    assert detokenizer.feed(1) == "\ufffd\ufffd"  # continuation bytes alone
    assert detokenizer.finish() == ""
