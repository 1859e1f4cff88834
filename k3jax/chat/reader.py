"""Token ids of a turn, while they are generated, to reasoning, content and tool calls."""

from collections.abc import Iterable, Sequence

from k3jax.chat.deltas import Delta
from k3jax.chat.detokenizer import Detokenizer
from k3jax.chat.encoding import END
from k3jax.chat.parser import Parser
from k3jax.chat.tokenizer import Tokenizer


class OutputReader:
    """`Parser` fed with ids, so that ordinary tokens that spell a control token stay text.

    A checkpoint with a chat template of its own writes plain text: all of it is content, its specials vanish.
    """

    def __init__(
        self, tokenizer: Tokenizer, thinking: bool, stop: str | Sequence[str] = (), stream_calls: bool = False
    ):
        self._tokenizer = tokenizer
        self._parser = Parser(thinking and tokenizer.xtml, stop, stream_calls)
        self._detokenizer = Detokenizer(tokenizer.token_bytes)

    @property
    def ended(self) -> bool:
        """The turn is over (its end or a stop string was seen): more ids are ignored."""
        return self._parser.ended

    def feed(self, ids: Iterable[int]) -> list[Delta]:
        """Deltas that are certain after these ids."""
        out: list[Delta] = []
        for id in ids:
            if self._tokenizer.is_special(id):
                out += self._parser.feed(self._detokenizer.finish(), control=False)
                out += self._parser.feed(self._tokenizer.token_bytes(id).decode(), control=True)
            else:
                out += self._parser.feed(self._detokenizer.feed(id), control=False)
        return out

    def finish(self, reason: str = "stop") -> list[Delta]:
        """What was held back, then `Finish`; `reason` tells why generation ended, "stop" that a stop id was drawn."""
        out = self._parser.feed(self._detokenizer.finish(), control=False)
        if reason == "stop":  # every stop id ends the turn, and with it what is still open
            out += self._parser.feed(END.text, control=True)
        return out + self._parser.finish(reason)
