"""Tokenizer folders that tests write: rank files with chosen pieces, and the special tables of K3 and the 48B."""

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k3jax.chat.prose import OWN_PROSE

# Offset from the first special id -> name (spec model 10.1).
K3_SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
K2_SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    9: "[EOT]",
    10: "<|im_system|>",
    17: "<|im_middle|>",
    254: "[UNK]",
    255: "[PAD]",
}
NOT_FLAGGED = ("<|open|>", "<|close|>", "<|sep|>")

# The usual order of single bytes in a byte-level rank file: the printable ones first.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = [bytes([b]) for b in (*_PRINTABLE, *(b for b in range(256) if b not in _PRINTABLE))]


def chain(piece: str) -> list[bytes]:
    """The pieces that merge into one from left to right, shortest first."""
    data = piece.encode()
    return [data[:n] for n in range(2, len(data) + 1)]


def write_ranks(folder: Path, tokens: Iterable[bytes]) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))


def write_folder(
    folder: Path, tokens: Iterable[bytes] = BYTES, specials: Mapping[int, str] = K3_SPECIALS, **config: Any
) -> Path:
    """A folder with these ordinary tokens in rank order and its own prose; `config` goes into tokenizer_config.json."""
    tokens = list(tokens)
    folder.mkdir(parents=True, exist_ok=True)
    write_ranks(folder, tokens)
    table = {
        str(len(tokens) + offset): {"content": name, "special": name not in NOT_FLAGGED}
        for offset, name in specials.items()
    }
    (folder / "chat_prose.json").write_text(json.dumps(dict(OWN_PROSE)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": table, **config}))
    return folder
