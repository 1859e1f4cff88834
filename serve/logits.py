"""What requests add to their logits: bias, penalties, a ban on ending early, grammars (spec serving 9)."""

import collections
from collections.abc import Sequence

import numpy as np

from serve.http.backend import Generate

BANNED = np.float32(-1e30)  # finite: a mask over all tokens still leaves a distribution


class Adjust:
    """The additions of one request, and the tokens that they depend on."""

    def __init__(self, request: Generate):
        self.how, self.grammar = request.sampling, request.grammar
        self._drawn = 0
        self._seen = collections.Counter(request.prompt)
        self._counts: collections.Counter[int] = collections.Counter()

    @staticmethod
    def of(request: Generate) -> "Adjust | None":
        """None for a request that adds nothing."""
        adjust = Adjust(request)
        return adjust if adjust.changes or request.sampling.logit_bias else None

    @property
    def changes(self) -> bool:
        """Whether the addition depends on the tokens drawn so far."""
        how = self.how
        penalties = (how.presence_penalty, how.frequency_penalty, how.repetition_penalty) != (0.0, 0.0, 1.0)
        return self.grammar is not None or penalties or how.min_new_tokens > 0

    def accept(self, tokens: Sequence[int]) -> None:
        """The next addition is for the token after these."""
        for token in tokens:
            self._drawn += 1
            self._counts[token] += 1
            self._seen[token] += 1
            if self.grammar is not None:
                self.grammar.accept(token)

    def arrays(self, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """[vocab] float32 each: what is added to the logits, and the repetition penalty that scales them before."""
        how = self.how
        added, repetition = np.zeros(vocab_size, np.float32), np.ones(vocab_size, np.float32)
        if how.repetition_penalty != 1.0:
            repetition[list(self._seen)] = how.repetition_penalty
        for token, value in how.logit_bias.items():
            added[token] += value
        if self._counts:
            ids, counts = list(self._counts), np.array(list(self._counts.values()), np.float32)
            added[ids] -= how.presence_penalty + how.frequency_penalty * counts
        if self._drawn < how.min_new_tokens:
            added[list(how.stop_ids)] = BANNED
        if self.grammar is not None:
            added[~self.grammar.mask()] = BANNED
        return added, repetition
