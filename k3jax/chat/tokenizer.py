"""Byte-level BPE tokenizer of a checkpoint folder: `tiktoken.model` and `tokenizer_config.json` (spec model 10.1)."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import tiktoken

from k3jax.chat.tokenizer_files import SPECIALS, read_eos, read_ranks, read_specials
from k3jax.checkpoint import resolve

_LETTER = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LETTER}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LETTER}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# The reference cuts longer inputs before tokenising; longer runs of spaces also overflow the regex engine's stack.
MAX_TEXT = 400_000
MAX_RUN = 25_000

STOP_NAMES = ("[EOS]", "[EOT]", "<|end_of_msg|>", "<|im_end|>")


class Tokenizer:
    """Ids of a checkpoint: n ordinary ones from the rank file, then 256 specials.

    `special` maps every special's name to its id, `stop_ids` are the ids that end a turn, the checkpoint's own eos
    first. All errors are ValueErrors.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        named_specials: Mapping[int, tuple[str, bool]],
        eos_ids: Sequence[int] = (),
        folder: Path | None = None,
    ):
        """`named_specials`: id -> (name, whether skip-special decoding drops it); the other specials get a name."""
        self.folder = folder
        self.vocab_size = len(ranks) + SPECIALS
        self._first_special = len(ranks)
        names = {id: f"<|reserved_token_{id}|>" for id in range(len(ranks), self.vocab_size)}
        names.update((id, name) for id, (name, _) in named_specials.items())
        self.special: Mapping[str, int] = {name: id for id, name in names.items()}
        self._kept = frozenset(id for id, (_, skip) in named_specials.items() if not skip)
        for id in eos_ids:
            self._check(id)
        stops = (*eos_ids, *(self.special[name] for name in STOP_NAMES if name in self.special))
        self.stop_ids = tuple(dict.fromkeys(stops))
        self._bpe = tiktoken.Encoding(
            str(folder), pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens=dict(self.special)
        )

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; names of specials in it are plain characters, so it never forges structure."""
        if not isinstance(text, str):
            raise ValueError(f"text is {type(text).__name__}, not a string; pass a str")
        return [id for piece in _cut(text) for id in self._bpe.encode_ordinary(piece)]

    def token_bytes(self, id: int) -> bytes:
        """Bytes of one token; of a special its name."""
        self._check(id)
        return self._bpe.decode_single_token_bytes(id)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of ids, U+FFFD for invalid UTF-8; skipping keeps the specials flagged as not special in the files."""
        ids = [int(id) for id in ids]
        for id in ids:
            self._check(id)
        if skip_special_tokens:
            ids = [id for id in ids if not self.is_special(id) or id in self._kept]
        return self._bpe.decode(ids, errors="replace")

    def is_special(self, id: int) -> bool:
        """Whether the id is one of the 256 after the ordinary ones."""
        return self._first_special <= id < self.vocab_size

    def _check(self, id: int) -> None:
        if not 0 <= id < self.vocab_size:
            raise ValueError(f"token id {id} is not in [0, {self.vocab_size}); use ids of this tokenizer's vocabulary")


def _cut(text: str) -> Iterator[str]:
    for start in range(0, len(text), MAX_TEXT):
        part = text[start : start + MAX_TEXT]
        if len(part) <= MAX_RUN:
            yield part
            continue
        begin = 0
        for run in re.finditer(r"\S+|\s+", part):
            for end in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield part[begin:end]
                begin = end
        yield part[begin:]


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Tokenizer of a preset with a shipped folder, a local folder, or a hub id (`org/name`)."""
    folder = resolve(name, weights=False)
    ranks = read_ranks(folder)
    return Tokenizer(ranks, read_specials(folder, len(ranks)), read_eos(folder), folder)
