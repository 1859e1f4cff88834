"""Tokenizer of a checkpoint folder: byte-level BPE and the chat encoding that its specials ask for (spec model 10)."""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tiktoken

from k3jax.chat.encoding import CONTROL_NAMES, Segment, render
from k3jax.chat.messages import Message, check_messages, check_options, check_tools, image_parts
from k3jax.chat.prose import load_prose
from k3jax.chat.template import ChatTemplate, load_template
from k3jax.chat.tokenizer_files import read_eos, read_ranks, read_specials
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
    """Tokenizer and chat encoding of a checkpoint folder; every error is a ValueError.

    Ids are n ordinary ones from the rank file, then 256 specials. `special` maps every special's name to its id;
    `stop_ids` are the ids that end a turn, the checkpoint's own eos first. `xtml` tells K3's chat encoding, which the
    special table decides, from a chat template in Jinja.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        ranks = read_ranks(self.folder)
        specials = read_specials(self.folder, len(ranks))
        self.vocab_size = len(ranks) + len(specials)
        self.special: Mapping[str, int] = {name: id for id, (name, _) in specials.items()}
        self._first_special = len(ranks)
        self._kept = frozenset(id for id, (_, skipped) in specials.items() if not skipped)
        eos = read_eos(self.folder, specials)
        for id in eos:
            self._check(id)
        stops = (*eos, *(self.special[name] for name in STOP_NAMES if name in self.special))
        self.stop_ids = tuple(dict.fromkeys(stops))
        self.xtml = all(name in self.special for name in CONTROL_NAMES)
        self._bpe = tiktoken.Encoding(
            str(folder), pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=dict(self.special)
        )

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; names of specials in it are plain characters, so it never forges structure."""
        if not isinstance(text, str):
            raise ValueError(f"text is {type(text).__name__}, not a string; pass a str")
        return [id for piece in _cut(text) for id in self._bpe.encode_ordinary(piece)]

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of each segment on its own; a control segment starts with the name of a special."""
        ids: list[int] = []
        for text, control in segments:
            if not control:
                ids += self.encode(text)
            elif text in self.special:
                ids.append(self.special[text])
            else:
                block = self._bpe.encode(text, allowed_special="all")
                if not block or not self.is_special(block[0]):
                    raise ValueError(
                        f"{text!r} starts with no special token of {self.folder}; give image_sizes for images,"
                        " and images only to a checkpoint with vision"
                    )
                ids += block
        return ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        effort: str | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        *,
        response_schema: Mapping[str, Any] | None = None,
        image_sizes: Sequence[tuple[int, int]] | None = None,
    ) -> list[int]:
        """Ids of a conversation in OpenAI's format; each image has one `<|media_pad|>`, to be repeated by the caller.

        Arguments as in `encoding.render`. A checkpoint with a chat template gets them as the template's variables.
        """
        options: dict[str, Any] = {
            "tools": tools,
            "thinking": thinking,
            "tool_choice": tool_choice,
            "response_format": response_format,
            "add_generation_prompt": add_generation_prompt,
        }
        if self.xtml:
            segments = render(
                messages,
                effort=effort,
                response_schema=response_schema,
                image_sizes=image_sizes,
                prose=self._prose,
                **options,
            )
        else:
            segments = self._render_template(messages, effort, options)
        return self.encode_segments(segments)

    def _render_template(
        self, messages: Sequence[Message], effort: str | None, options: dict[str, Any]
    ) -> list[Segment]:
        check_messages(messages)
        check_options(effort, options["tool_choice"], options["response_format"])
        if options["tools"]:
            check_tools(options["tools"])
        if next(image_parts(messages), None) is not None:
            raise ValueError(f"{self.folder} has a text-only chat template; leave the image parts out")
        return self._template.render(
            messages=messages, enable_thinking=options["thinking"], reasoning_effort=effort, **options
        )

    @functools.cached_property
    def _prose(self) -> Mapping[str, str]:
        return load_prose(self.folder)

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return load_template(self.folder, self.special)

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
    return Tokenizer(resolve(name, weights=False))
