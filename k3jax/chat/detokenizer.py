"""Token bytes to text, one token at a time."""

import codecs
from collections.abc import Callable


class Detokenizer:
    """Incremental UTF-8 decoder; all pieces together equal `b"".join(token bytes).decode("utf-8", "replace")`.

    An unfinished character is held back. U+FFFD appears once its bytes cannot become valid any more (for a surrogate
    with the third byte), or in `finish`. `token_bytes` maps an id to its bytes, as `Tokenizer.token_bytes` does.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]):
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int | bytes) -> str:
        """Text that the next token, an id or its bytes, completes; may be empty."""
        return self._decoder.decode(token if isinstance(token, bytes) else self._token_bytes(token))

    def finish(self) -> str:
        """U+FFFD for an unfinished character, else nothing; also for use before a control token. Feeding may go on."""
        return self._decoder.decode(b"", final=True)
