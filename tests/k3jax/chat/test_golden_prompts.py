"""Published prompt ids of spec model 10.9, with a stand-in for the vocabulary.

The stand-in has K3's size, special table, byte order and the published ids of the pieces that these prompts use. Its
other entries are fillers. The published ids do not say where `_weather` is cut; the stand-in cuts it after `_w`.
"""

import pytest

from k3jax.chat import Tokenizer
from tests.k3jax.chat.folders import BYTES, K3_SPECIALS, chain, write_folder

PIECES = {
    "message": 2778, " role": 6244, '="': 878, "user": 2482, "system": 14062, "assistant": 69702, "think": 39964,
    "response": 12092, "tools": 25385, "call": 10257, "argument": 47185, " tool": 4453, " index": 4002, " key": 2355,
    " type": 1798, "tool": 20960, "Hi": 18699, "because": 47221, "get": 618, "_w": 21055, "eather": 2800, "city": 37666,
    "string": 2033, "Paris": 113476, "days": 21030, "number": 10006, "18": 1428, "What": 5376, " does": 2354, " [": 793,
    "EOS": 85521, " mean": 4992, " vs": 12583, "PAD": 54904, " and": 316, "UNK": 57780, "]?": 87795, "Hello": 19180,
    " world": 2695, "123": 6694, "456": 12972, "789": 16242, "\u4f60\u597d": 33845, "\u4e16\u754c": 2243,
    "\u4e2d\u6587": 16717, "English": 44372, "\u6df7\u5408": 13935,
}  # fmt: skip
ORDINARY = 163584


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    ranks = dict(zip(BYTES, range(256), strict=True)) | {piece.encode(): id for piece, id in PIECES.items()}
    steps = [step for piece in ("eather", "\u4f60\u597d", "\u4e16\u754c") for step in chain(piece)[:-1]]
    ranks |= {step: 256 + i for i, step in enumerate(steps)}
    tokens = {rank: token for token, rank in ranks.items()}
    assert len(tokens) == 256 + len(PIECES) + len(steps)
    filled = (tokens.get(rank, b"\xff\xfe" + rank.to_bytes(3, "big")) for rank in range(ORDINARY))
    folder = write_folder(tmp_path_factory.mktemp("k3"), filled, K3_SPECIALS, eos_token="[EOS]")
    (folder / "generation_config.json").write_text('{"max_length": 1048576, "eos_token_id": 163586}')
    return Tokenizer(folder)


def ids(text):
    return [int(word) for word in text.split()]


USER = "163587 2778 6244 878 2482 1 163589"
ASSISTANT = "163587 2778 6244 878 69702 1 163589"
END = "163588 2778 163589 163586"
OPEN_THINK, CLOSE_THINK = "163587 39964 163589", "163588 39964 163589"
TURN_Q1 = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1", "reasoning_content": "because"},
    {"role": "user", "content": "q2"},
]
CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 3}'}}


def test_sizes_and_stops(tokenizer):
    assert tokenizer.vocab_size == 163840
    assert tokenizer.special["<|media_pad|>"] == 163605
    assert tokenizer.special["<|reserved_token_163594|>"] == 163594
    assert tokenizer.stop_ids == (163586, 163585, 163593)


@pytest.mark.parametrize("thinking, channel", [(True, "163587 39964 163589"), (False, "163587 12092 163589")])
def test_one_user_message(tokenizer, thinking, channel):
    got = tokenizer.encode_chat([{"role": "user", "content": "Hi"}], thinking=thinking)
    assert got == ids(f"{USER} 18699 {END} {ASSISTANT} {channel}")


def test_history_with_reasoning(tokenizer):
    assert tokenizer.encode_chat(TURN_Q1) == ids(
        f"{USER} 80 16 {END} {ASSISTANT} {OPEN_THINK} 47221 {CLOSE_THINK} 163587 12092 163589 64 16 163588 12092 163589"
        f" {END} {USER} 80 17 {END} {ASSISTANT} {OPEN_THINK}"
    )


def test_tool_call_and_result(tokenizer):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "18C"},
    ]
    tools = (
        "163587 25385 163589 163587 10257 4453 878 618 21055 2800 1 4002 878 16 1 163589 163587 47185 2355 878 37666 1"
        " 1798 878 2033 1 163589 113476 163588 47185 163589 163587 47185 2355 878 21030 1 1798 878 10006 1 163589 18"
        " 163588 47185 163589 163588 10257 163589 163588 25385 163589"
    )
    result = (
        "163587 2778 6244 878 20960 1 4453 878 618 21055 2800 1 4002 878 16 1 163589 1428 34 163588 2778 163589 163586"
    )
    assert tokenizer.encode_chat(messages, thinking=False, add_generation_prompt=False) == ids(
        f"{USER} 18699 {END} {ASSISTANT} 163587 12092 163589 163588 12092 163589 {tools} {END} {result}"
    )


def test_names_of_specials_in_user_text(tokenizer):
    text = "What does [EOS] mean vs [PAD] and [UNK]?"
    body = "5376 2354 793 85521 60 4992 12583 793 54904 60 316 793 57780 87795"
    got = tokenizer.encode_chat([{"role": "user", "content": text}], add_generation_prompt=False)
    assert got == ids(f"{USER} {body} {END}")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Hello world", "19180 2695"),
        ("Hello, world!", "19180 11 2695 0"),
        ("1234567890", "6694 12972 16242 15"),
        ("\u4f60\u597d\u4e16\u754c", "33845 2243"),
        ("\u4e2d\u6587English\u6df7\u5408", "16717 44372 13935"),
    ],
)
def test_ordinary_text(tokenizer, text, expected):
    assert tokenizer.encode(text) == ids(expected)


def test_image_block(tokenizer):
    messages = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "Hi"}]}
    ]
    got = tokenizer.encode_chat(messages, add_generation_prompt=False, image_sizes=[(123, 456)])
    words = tokenizer.encode("image 123x456")
    assert got == [*ids(USER), 163602, *words, 163603, 163605, 163604, 18699, *ids(END)]
