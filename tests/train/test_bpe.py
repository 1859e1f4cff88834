"""The rank file: a round trip through tiktoken, merges by frequency, no digit in any merge, K3's special names."""

import base64
import json

import pytest

from train.bpe import train_bpe, write_tokenizer


def test_merges_follow_frequency_and_ties_the_smaller_pair():
    tokens = train_bpe(["abab abab cdcd"] * 2, 258)
    assert tokens[:256] == [bytes([b]) for b in range(256)]
    # "ab" occurs 4 times per text ("abab" and " abab"), "ba" 2, "cd" 2, " a" 1
    assert tokens[256] == b"ab"
    # then abab twice, " cdcd" holds cd twice: equal counts, and the pair (ab, ab) is smaller than (c, d)
    assert tokens[257] == b"abab"


def test_digits_are_never_merged(tokenizer):
    assert all(not any(48 <= byte <= 57 for byte in tokenizer.token_bytes(i)) for i in range(256, 320))
    assert tokenizer.encode("1234567") == [ord(c) for c in "1234567"]


@pytest.mark.parametrize("text", ["What is 23+45?", "Größe \U0001f600 漢字\n\t x", "", "a" * 70, "<|open|>"])
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(i < 320 for i in ids)


def test_file_is_one_base64_token_and_rank_per_line(tokenizer_folder, tokenizer):
    lines = (tokenizer_folder / "tiktoken.model").read_text().splitlines()
    for rank, line in enumerate(lines):
        token, number = line.split()
        assert int(number) == rank and base64.b64decode(token) == tokenizer.token_bytes(rank)
    assert len(lines) == 320


def test_specials_stand_at_the_offsets_of_k3(tokenizer_folder, tokenizer):
    k3 = {"[BOS]": 163584, "<|end_of_msg|>": 163586, "<|sep|>": 163589, "[EOT]": 163593, "<|media_pad|>": 163605}
    k3 |= {"<osagent_mode>": 163649, "[UNK]": 163838, "[PAD]": 163839}
    for name, id in k3.items():
        assert tokenizer.special[name] == id - 163584 + 320
    assert tokenizer.vocab_size == 576
    table = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    kept = {entry["content"] for entry in table.values() if not entry["special"]}
    assert kept == {"<|open|>", "<|close|>", "<|sep|>"}
    assert tokenizer.stop_ids[0] == tokenizer.special["<|end_of_msg|>"]


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="ranks is 255, the minimum is 256"):
        train_bpe(["abc"], 255)
    with pytest.raises(ValueError, match="ranks is 300, the texts give only 258"):
        train_bpe(["abc\nabc"], 300)  # only "abc" occurs twice: ab, abc
    write_tokenizer(tmp_path, [bytes([b]) for b in range(256)], 64)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"max_length": 64, "eos_token_id": 258}
