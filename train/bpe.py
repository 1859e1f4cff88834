"""Byte-level BPE: learn a rank file in tiktoken's format and name K3's specials after it (spec model 10.1)."""

import base64
import collections
import json
from collections.abc import Iterable
from pathlib import Path

import regex

from k3jax.chat.prose import OWN_PROSE
from k3jax.chat.tokenizer import PATTERN

SPECIALS = {  # offset after the last rank -> name, at K3's own offsets
    0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>", 6: "[start_header_id]",
    7: "[end_header_id]", 9: "[EOT]", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 65: "<osagent_mode>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
KEPT = ("<|open|>", "<|close|>", "<|sep|>")  # flagged as not special: skip-special decoding keeps them
SPECIAL_COUNT = 256
DIGITS = frozenset(b"0123456789")


def train_bpe(texts: Iterable[str], ranks: int) -> list[bytes]:
    """`ranks` tokens: the 256 bytes, then the merges, most frequent pair first and the smaller pair on ties.

    Pieces with a digit take no part, so numbers are read and written digit by digit; nor do pieces seen once.
    """
    if ranks < 256:
        raise ValueError(f"ranks is {ranks}, the minimum is 256 for the single bytes; ask for more")
    pieces = collections.Counter(piece.encode() for text in texts for piece in regex.findall(PATTERN, text, regex.V1))
    words = [([bytes([b]) for b in piece], n) for piece, n in pieces.items() if n > 1 and DIGITS.isdisjoint(piece)]
    tokens = [bytes([b]) for b in range(256)]
    while len(tokens) < ranks:
        pairs: collections.Counter[tuple[bytes, bytes]] = collections.Counter()
        for word, n in words:
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] += n
        if not pairs:
            raise ValueError(f"ranks is {ranks}, the texts give only {len(tokens)}; ask for fewer or add text")
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        tokens.append(best[0] + best[1])
        words = [(_merge(word, best), n) for word, n in words]
    return tokens


def _merge(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    out: list[bytes] = []
    i = 0
    while i < len(word):
        if tuple(word[i : i + 2]) == pair:
            out.append(pair[0] + pair[1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def write_tokenizer(folder: Path, tokens: list[bytes], max_length: int) -> None:
    """`tiktoken.model`, `tokenizer_config.json`, `generation_config.json` and the fixed chat texts, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (folder / "tiktoken.model").write_text("".join(lines), encoding="ascii")
    named = {len(tokens) + offset: name for offset, name in SPECIALS.items()}
    config = {
        "added_tokens_decoder": {str(id): {"content": n, "special": n not in KEPT} for id, n in named.items()},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "model_max_length": max_length,
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "generation_config.json", {"max_length": max_length, "eos_token_id": len(tokens) + 2})
    _write_json(folder / "chat_prose.json", dict(OWN_PROSE))


def _write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
