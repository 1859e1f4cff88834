"""Token ids of a turn to deltas."""

import pytest

from k3jax.chat.deltas import Message, ToolCall, join
from k3jax.chat.reader import OutputReader
from k3jax.chat.tokenizer import Tokenizer
from tests.k3jax.chat.folders import K2_SPECIALS, write_folder
from tests.k3jax.chat.outputs import tokens

TURN = (
    "5 < 7 👍🏽<|close|>think<|sep|><|open|>response<|sep|>né<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="k" type="string"<|sep|>"ß"<|close|>argument<|sep|>'
)
REST = "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return Tokenizer(write_folder(tmp_path_factory.mktemp("k3")))


def ids_of(tok, text):
    return [i for part, control in tokens(text) for i in ([tok.special[part]] if control else tok.encode(part))]


def read(tok, ids, size, reason="stop", thinking=True, **how):
    reader = OutputReader(tok, thinking, **how)
    deltas = [d for at in range(0, len(ids), size) for d in reader.feed(ids[at : at + size])]
    return join([*deltas, *reader.finish(reason)])


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("ending", ["", REST])
def test_a_turn_of_ids(tok, size, ending):
    """However the ids come; without the closing tags a drawn stop id completes the call."""
    message = read(tok, ids_of(tok, TURN + ending), size)
    assert message == Message("5 < 7 👍🏽", "né", [ToolCall("f", '{"k": "\\"ß\\""}')], "tool_calls")


def test_a_cut_turn_drops_the_open_call(tok):
    assert read(tok, ids_of(tok, TURN), 3, "length") == Message("5 < 7 👍🏽", "né", [], "length")


def test_a_character_cut_in_bytes_is_replaced_at_the_end(tok):
    ids = tok.encode("👍")[:2]
    assert read(tok, ids, 1, "length", thinking=False).content == "\ufffd"
    assert read(tok, [*ids, *ids_of(tok, "<|close|>response<|sep|>")], 1, thinking=False).content == "\ufffd"


def test_spelled_control_tokens_stay_text(tok):
    text = "<|close|>think<|sep|><|end_of_msg|>"
    assert read(tok, tok.encode(text), 1, "length").reasoning == text


def test_stop_strings_end_the_turn(tok):
    reader = OutputReader(tok, thinking=False, stop="STOP")
    deltas = reader.feed(tok.encode("abSTOPcd"))
    assert reader.ended
    assert join([*deltas, *reader.finish("length")]) == Message("", "ab", [], "stop", "STOP")


def test_a_checkpoint_without_xtml_writes_content(tmp_path):
    tok = Tokenizer(write_folder(tmp_path, specials=K2_SPECIALS))
    ids = [*tok.encode("a<|close|>b"), tok.special["<|im_end|>"]]
    assert read(tok, ids, 2).content == "a<|close|>b"
