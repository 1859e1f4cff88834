"""Constrained output through llguidance: sources of grammars, compiled against a tokenizer's token table.

A grammar is a list of named llguidance grammars whose first is the start; JSON text of it is a `Source`.
"""

import functools
import json
import threading
from collections.abc import Mapping
from typing import Any

import llguidance
import numpy as np

from k3jax.chat.tokenizer import Tokenizer

Body = Mapping[str, Any]  # {"json_schema": ...} or {"lark_grammar": ...}, as llguidance reads it
Source = str

COMPACT = {"whitespace_flexible": False}  # JSON without any space outside strings (spec serving 10.4)
ANY_OBJECT: Body = {"json_schema": {"type": "object", "x-guidance": COMPACT}}


class Matcher:
    """A `backend.GrammarMatcher` on llguidance; ids behind the tokenizer's, up to `vocab_size`, are forbidden."""

    def __init__(self, matcher: llguidance.LLMatcher, stop_ids: tuple[int, ...], vocab_size: int):
        self._matcher, self._stop_ids, self._vocab_size = matcher, list(stop_ids), vocab_size

    def mask(self) -> np.ndarray:
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        mask = np.zeros(self._vocab_size, bool)
        size = min(len(bits), self._vocab_size)
        mask[:size] = bits[:size]
        if not mask.any():  # over, or a limit of the parser was hit: the turn ends
            mask[self._stop_ids] = True
        return mask

    def accept(self, token: int) -> bool:
        if self._matcher.is_stopped():
            return token in self._stop_ids
        return self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, tokens: int) -> None:
        self._matcher.rollback(tokens)

    def copy(self) -> "Matcher":
        """An independent matcher in the same state, for another sequence."""
        return Matcher(self._matcher.deep_copy(), tuple(self._stop_ids), self._vocab_size)


class Grammars:
    """Compiles sources for one tokenizer; thread-safe. The first use builds the token table, about 1 s for K3's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._compiled = functools.lru_cache(maxsize=64)(self._compile)

    def compile(self, source: Source) -> Matcher:
        """A fresh matcher; ValueError says why a source is no grammar."""
        with self._lock:
            return self._compiled(source).copy()

    def error(self, source: Source) -> str | None:
        """Why a source is no grammar, else None."""
        message = llguidance.LLMatcher.validate_grammar(source, self._table)
        return None if not message or message.startswith("WARNING") else _first_line(message)

    def _compile(self, source: Source) -> Matcher:
        matcher = llguidance.LLMatcher(self._table, source, log_level=0)
        if matcher.is_error():
            raise ValueError(_first_line(matcher.get_error()))
        return Matcher(matcher, self._tokenizer.stop_ids, self._vocab_size)

    @functools.cached_property
    def _table(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_TokenTable(self._tokenizer)), eos_token=list(self._tokenizer.stop_ids)
        )


class _TokenTable:
    """A tokenizer as llguidance wants to see one."""

    def __init__(self, tokenizer: Tokenizer):
        ids = range(tokenizer.vocab_size)
        self.eos_token_id = tokenizer.stop_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(id) for id in ids]
        self.special_token_ids = [id for id in ids if tokenizer.is_special(id)]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text only")
        return self._encode(text)


def source(start: Body, **others: Body) -> Source:
    """JSON text of a grammar; the start refers to the others by `@name`."""
    grammars = [{"name": "start", **start}, *({"name": name, **body} for name, body in others.items())]
    return json.dumps({"grammars": grammars})


def regex_body(pattern: str) -> Body:
    """The whole text matches the regular expression (Rust's syntax, no look-around)."""
    compiled = json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))
    return {"lark_grammar": compiled["grammars"][0]["lark_grammar"]}


def grammar_body(text: str) -> Body:
    """A grammar in Lark's or GBNF's syntax; ValueError if it is neither."""
    try:
        return {"lark_grammar": llguidance.grammar_from("grammar", text)}
    except Exception as error:  # the converter raises bare exceptions on text that is no grammar
        raise ValueError(f"it is no Lark or GBNF grammar: {_first_line(str(error))}") from None


def schema_body(schema: Mapping[str, Any], **options: Any) -> Body:
    """Compact JSON that fits the schema."""
    return {"json_schema": {**schema, "x-guidance": {**COMPACT, **options}}}


def _first_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip(" ^|")]
    reason = next((line for line in lines if line.startswith("error:")), None)
    return (f"{lines[0]} {reason}" if reason and reason != lines[0] else lines[0])[:300] if lines else "unknown reason"
