"""The tokenizer's files in a checkpoint folder, each checked whole before use; every error is a ValueError."""

import base64
import binascii
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3jax import files

SPECIALS = 256  # special ids after the ordinary ones


def read_ranks(folder: Path) -> dict[bytes, int]:
    """`tiktoken.model`: one `base64(bytes) rank` per line, ranks 0..n-1 without gaps, all 256 single bytes present."""
    path = folder / "tiktoken.model"
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            encoded, rank = line.split()
            token, value = base64.b64decode(encoded, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(
                f"{path} line {number} is {line[:40]!r}, not `base64 rank`; download the file again"
            ) from None
        if not token or token in ranks:
            raise ValueError(f"{path} line {number} holds {token!r}, an empty or repeated token; download it again")
        ranks[token] = value
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(
            f"{path} holds {len(ranks)} tokens, but not with the ranks 0 to {len(ranks) - 1} once each;"
            " download it again"
        )
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise ValueError(f"{path} has no token for the single byte {missing:#04x}; download it again")
    return ranks


def read_specials(folder: Path, ordinary: int) -> dict[int, tuple[str, bool]]:
    """(name, flagged special) of all 256 ids after the ordinary ones, named by `tokenizer_config.json` or reserved."""
    path = folder / "tokenizer_config.json"
    table = read_json(path).get("added_tokens_decoder")
    if not isinstance(table, dict) or not table:
        raise ValueError(
            f"{path} has no added_tokens_decoder, which names the special tokens; use the checkpoint's own file"
        )
    specials: dict[int, tuple[str, bool]] = {}
    for key, entry in table.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name:
            raise ValueError(f"{path} added_tokens_decoder[{key!r}] has no content; use the checkpoint's own file")
        if not key.isdecimal() or not ordinary <= int(key) < ordinary + SPECIALS:
            raise ValueError(
                f"{path} gives {name} the id {key}, but the specials beside this tiktoken.model are"
                f" {ordinary} to {ordinary + SPECIALS - 1}; use files of one checkpoint"
            )
        specials[int(key)] = name, entry.get("special", True) is not False
    for id in range(ordinary, ordinary + SPECIALS):
        specials.setdefault(id, (f"<|reserved_token_{id}|>", True))
    name, uses = Counter(name for name, _ in specials.values()).most_common(1)[0]
    if uses > 1:
        raise ValueError(f"{path} gives the name {name} to {uses} ids; use the checkpoint's own file")
    return specials


def read_eos(folder: Path, specials: Mapping[int, tuple[str, bool]]) -> list[int]:
    """Ids of `eos_token_id` in `generation_config.json`, then of `eos_token` in `tokenizer_config.json`."""
    path = folder / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.is_file() else None
    ids = list(eos) if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(id) is int for id in ids):
        raise ValueError(f"{path} has eos_token_id {eos!r}, not an integer or a list of them; correct it")
    path = folder / "tokenizer_config.json"
    token = read_json(path).get("eos_token")
    if token is None:
        return ids
    wanted = token.get("content") if isinstance(token, dict) else token
    id = next((id for id, (name, _) in specials.items() if name == wanted), None)
    if id is None:
        raise ValueError(f"{path} has eos_token {wanted!r}, which added_tokens_decoder does not name; correct it")
    return [*ids, id]


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; use a folder with the checkpoint's tokenizer files") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file; download it again") from None


def read_json(path: Path) -> dict[str, Any]:
    read_text(path)  # refuses a missing or binary file
    data = files.read_json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no JSON object; download it again")
    return data
