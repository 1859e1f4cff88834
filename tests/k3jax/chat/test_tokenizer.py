import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import k3jax
from k3jax.chat import Tokenizer
from k3jax.chat.encoding import Segment
from k3jax.chat.tokenizer import MAX_RUN, MAX_TEXT
from tests.k3jax.chat.folders import BYTES, K2_SPECIALS, K3_SPECIALS, write_folder

N = 260  # ordinary ids of the small vocabulary: the bytes and four merges
MERGES = [b'="', b'?"', b"th", b"the"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("small"), [*BYTES, *MERGES])


@pytest.fixture(scope="module")
def tokenizer(folder):
    return k3jax.load_tokenizer(folder)


def test_sizes_names_and_stops(tokenizer, folder):
    assert tokenizer.vocab_size == N + 256
    assert tokenizer.folder == folder
    assert len(tokenizer.special) == 256
    assert tokenizer.special["<|open|>"] == N + 3
    assert tokenizer.special[f"<|reserved_token_{N + 8}|>"] == N + 8
    assert tokenizer.stop_ids == (N + 1, N + 9, N + 2)  # [EOS], [EOT], <|end_of_msg|>
    assert [tokenizer.is_special(id) for id in (0, N - 1, N, N + 255, N + 256, -1)] == [False] * 2 + [True] * 2 + [
        False
    ] * 2


def test_own_eos_comes_first(tmp_path):
    eos = {"content": "[PAD]", "lstrip": False}
    folder = write_folder(tmp_path, specials=K2_SPECIALS, eos_token=eos)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 300]}))
    assert Tokenizer(folder).stop_ids == (258, 300, 511, 257, 265)


def test_merges_go_by_rank(tokenizer):
    assert tokenizer.encode("the") == [N - 1]
    assert tokenizer.encode("th") == [N - 2]
    assert tokenizer.encode('="?"') == [N - 4, N - 3]


def test_segments_are_tokenised_apart(tokenizer):
    """The value of an attribute must not merge with the quote that ends it."""
    segments = [Segment('="'), Segment("?"), Segment('"')]
    question, quote = BYTES.index(b"?"), BYTES.index(b'"')
    assert tokenizer.encode_segments(segments) == [N - 4, question, quote]
    assert tokenizer.encode("".join(segment.text for segment in segments)) == [N - 4, N - 3]


def test_text_never_gives_a_special(tokenizer):
    for name in tokenizer.special:
        ids = tokenizer.encode_segments([Segment(name)])
        assert not any(map(tokenizer.is_special, ids))
        assert tokenizer.decode(ids) == name
        assert tokenizer.encode_segments([Segment(name, control=True)]) == [tokenizer.special[name]]


def test_decode_skips_what_is_flagged(tokenizer):
    names = ["[BOS]", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", f"<|reserved_token_{N + 8}|>"]
    ids = [*tokenizer.encode("a"), *(tokenizer.special[name] for name in names)]
    assert tokenizer.decode(ids) == "a" + "".join(names)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<|open|><|close|><|sep|>"


def test_token_bytes_and_invalid_utf8(tokenizer):
    assert [tokenizer.token_bytes(id) for id in range(256)] == BYTES
    assert tokenizer.token_bytes(N + 3) == b"<|open|>"
    euro = [BYTES.index(bytes([b])) for b in "\u20ac".encode()]
    assert tokenizer.decode(euro) == "\u20ac"
    assert tokenizer.decode(euro[:2]) == "\ufffd"


@given(st.text())
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@given(
    st.lists(st.sampled_from(["[EOS]", "<|open|>", "<|", "open", "|>", "[", "EOS]", " ", "\n", "\u4f60"])).map("".join)
)
def test_fragments_of_names_never_give_a_special(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < N


def test_surrogates_are_replaced(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


# Text and its pre-tokens, read off the branches of spec model 10.1.
PRETOKENS = [
    ["\u4f60\u597d", "abc", "\u4e16"],  # Han is apart from other letters
    [",\u00e9te\u0301x", ",\u0301y"],  # one non-letter before letters; combining marks belong to the word
    ["Hello", "World"],  # upper-case after lower-case starts a word
    ["HELLOworld"],
    ["123", "456", "7"],
    ["\u0663\u0664\u0665", "\u0666"],  # other digits in threes as well
    ["I'll", " don't", " WE'RE"],
    [" x", " ", " y"],  # the last space of a run goes to the next word
    ["a", " \n\n", "b"],
    ["a", " !!\n\n", "b"],
    ["a", "  "],
    ["\u304b\u306a", "\u6f22", "\u304b"],
    ["\u0e19\u0e49\u0e33", " \u0e44"],
    ["a", ".\n", "/b"],  # a slash may start a word; newlines stay with punctuation
    ["\U0001f680", "\u00a0x"],
]


@pytest.mark.parametrize("pieces", PRETOKENS)
def test_pretokens(tmp_path, pieces):
    """Each piece has its own token here, so that ids show the cuts; the whole has one that must not be used."""
    whole = "".join(pieces)
    multi = {piece: None for piece in pieces if len(piece.encode()) > 1}
    extra = [*(piece.encode() for piece in multi), *([whole.encode()] if len(pieces) > 1 else [])]
    tokenizer = Tokenizer(write_folder(tmp_path, [*BYTES, *extra]))
    got = [tokenizer.token_bytes(id).decode() for id in tokenizer.encode(whole)]
    assert got == pieces


def test_long_runs_are_cut(tokenizer):
    """Runs of one kind are cut after 25,000 characters and text after 400,000; the pieces are tokenised apart."""
    assert tokenizer.encode("t" * (MAX_RUN - 1) + "the") == [BYTES.index(b"t")] * MAX_RUN + tokenizer.encode("he")
    assert tokenizer.encode("t" * (MAX_RUN - 3) + "the") == [BYTES.index(b"t")] * (MAX_RUN - 3) + tokenizer.encode(
        "the"
    )
    words = "t " * (MAX_TEXT // 2 - 1) + " t"
    assert tokenizer.encode(words + "he")[-3:] == tokenizer.encode("t") + tokenizer.encode("he")
    for text in (" " * 1_000_000, "\t \u3000" * 200_000, "\n" * 500_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_presets_without_folder_and_unknown_names():
    with pytest.raises(ValueError, match="preset 'tiny' has a config but no weights"):
        k3jax.load_tokenizer("tiny")
    with pytest.raises(ValueError, match="not a folder, a preset"):
        k3jax.load_tokenizer("./nowhere")


def lines(folder):
    return (folder / "tiktoken.model").read_text().splitlines(keepends=True)


def damage(folder, how):
    rows, config = lines(folder), json.loads((folder / "tokenizer_config.json").read_text())
    table = config["added_tokens_decoder"]
    match how:
        case "gap":
            del rows[3]
        case "duplicate rank":
            rows[3] = rows[3].split()[0] + " 4\n"
        case "duplicate token":
            rows[256] = rows[3].split()[0] + " 256\n"
        case "garbage":
            rows[3] = "no base64! 3\n"
        case "no rank":
            rows[3] = rows[3].split()[0] + "\n"
        case "byte missing":
            rows[3] = "YWJj 3\n"
        case "outside":
            table["100"] = {"content": "[X]"}
        case "named twice":
            table["300"] = {"content": "[BOS]"}
        case "reserved name":
            table["300"] = {"content": f"<|reserved_token_{N + 8}|>"}
        case "no content":
            table["300"] = {}
        case "eos":
            config["eos_token"] = "[END]"
        case "no table":
            del config["added_tokens_decoder"]
        case "eos id":
            (folder / "generation_config.json").write_text('{"eos_token_id": 9999}')
        case "eos type":
            (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    (folder / "tiktoken.model").write_text("".join(rows))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "how, sentence",
    [
        ("gap", "holds 259 tokens, but not with the ranks 0 to 258 once each"),
        ("duplicate rank", "holds 260 tokens, but not with the ranks 0 to 259 once each"),
        ("duplicate token", "line 257 holds b'\\$', an empty or repeated token"),
        ("garbage", "line 4 is 'no base64! 3', not `base64 rank`"),
        ("no rank", "line 4 is 'JA==', not `base64 rank`"),
        ("byte missing", "no token for the single byte 0x24"),
        ("outside", r"gives \[X\] the id 100, but the specials beside this tiktoken.model are 260 to 515"),
        ("named twice", r"gives the name \[BOS\] to 2 ids"),
        ("reserved name", "gives the name <|reserved_token_268|> to 2 ids".replace("|", r"\|")),
        ("no content", r"added_tokens_decoder\['300'\] has no content"),
        ("eos", r"eos_token '\[END\]', which added_tokens_decoder does not name"),
        ("no table", "has no added_tokens_decoder"),
        ("eos id", r"token id 9999 is not in \[0, 516\)"),
        ("eos type", "eos_token_id 'x', not an integer"),
    ],
)
def test_damaged_files_are_refused(tmp_path, how, sentence):
    folder = write_folder(tmp_path, [*BYTES, *MERGES])
    damage(folder, how)
    with pytest.raises(ValueError, match=sentence):
        Tokenizer(folder)


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "data, sentence",
    [(None, "is missing"), (b"\xff\xfe\x00", "is not a text file"), (b"{{", "not `base64 rank`|not valid JSON")],
)
def test_missing_and_binary_files_are_refused(tmp_path, name, data, sentence):
    folder = write_folder(tmp_path)
    if data is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=sentence):
        Tokenizer(folder)


def test_ids_and_text_of_the_wrong_kind(tokenizer):
    for id in (-1, N + 256):
        for use in (tokenizer.token_bytes, lambda id: tokenizer.decode([id])):
            with pytest.raises(ValueError, match=r"is not in \[0, 516\)"):
                use(id)
    with pytest.raises(ValueError, match="text is bytes, not a string"):
        tokenizer.encode(b"x")


def test_control_segment_without_special(tokenizer):
    with pytest.raises(ValueError, match="starts with no special token"):
        tokenizer.encode_segments([Segment("<|kimi_image_placeholder|>", control=True)])


def test_special_table_decides_the_chat_format(tmp_path):
    assert Tokenizer(write_folder(tmp_path / "k3", specials=K3_SPECIALS)).xtml
    k2 = Tokenizer(write_folder(tmp_path / "k2", specials=K2_SPECIALS))
    assert not k2.xtml
    with pytest.raises(ValueError, match="has no chat template"):
        k2.encode_chat([{"role": "user", "content": "x"}])
