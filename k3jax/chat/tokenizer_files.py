"""The tokenizer's files in a checkpoint folder, each checked whole before use; every error is a ValueError."""

import base64
import binascii
import json
from pathlib import Path
from typing import Any

SPECIALS = 256  # special ids after the ordinary ones


def read_ranks(folder: Path) -> dict[bytes, int]:
    """`tiktoken.model`: one `base64(bytes) rank` per line, ranks 0..n-1 without gaps, all 256 single bytes present."""
    path = folder / "tiktoken.model"
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
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
    """id -> (name, flagged special): `added_tokens_decoder` of `tokenizer_config.json`, ids after the ordinary."""
    path = folder / "tokenizer_config.json"
    table = _read_json(path).get("added_tokens_decoder")
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
        if name in (other for other, _ in specials.values()):
            raise ValueError(f"{path} names {name} twice; use the checkpoint's own file")
        specials[int(key)] = name, entry.get("special", True) is not False
    return specials


def read_eos(folder: Path) -> tuple[int, ...]:
    """`eos_token_id` of `generation_config.json` (an id or several), () without that file or entry."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    eos = _read_json(path).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(id) is int for id in ids):
        raise ValueError(f"{path} has eos_token_id {eos!r}, not an integer or a list of them; correct it")
    return tuple(ids)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; use a folder with the checkpoint's tokenizer files") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file; download it again") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no JSON object; download it again")
    return data
