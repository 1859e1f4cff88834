"""A request as the scheduler sees it: what is known, what is computed, what it holds."""

import numpy as np

from serve.memory.host import Parked
from serve.memory.keys import extend_keys
from serve.memory.node import Node
from serve.memory.tree import Match
from serve.types import FinishReason, Progress, Request


class Sequence:
    """Lengths are tokens. `computed` and `drawn` count what planned steps will have done, `tokens` what is known."""

    __slots__ = (
        "arrival",
        "branch",
        "cached",
        "collected",
        "computed",
        "draft",
        "drawn",
        "finish",
        "fork",
        "forks",
        "guessing",
        "held",
        "inserted",
        "items",
        "keys",
        "lane",
        "leader",
        "node",
        "number",
        "parked",
        "prefill_end",
        "request",
        "retracted",
        "slot",
        "table",
        "tokens",
        "track",
        "unread",
        "write_from",
    )

    def __init__(self, request: Request, number: int, arrival: float, progress: Progress | None = None):
        self.request, self.number, self.arrival = request, number, arrival
        self.tokens: list[int] = list(request.prompt)
        self.items = self.tokens if request.key is None else list(request.key)  # the same tokens for the cache
        self.keys: list[bytes] = []
        self.drawn = 0  # new tokens, those of steps in flight included
        self.unread = 0  # steps in flight whose draws are not known yet
        self.cached: int | None = None
        self.finish: FinishReason | None = None
        self.retracted = self.guessing = False  # guessing: the step in flight verifies a draft
        self.lane = -1
        self.inserted = 0  # tokens whose state and latent rows arrive with the first step, from elsewhere or the host
        self.parked: Parked | None = None
        self.draft: list[int] = []
        self.leader: Sequence | None = None  # the running request whose state at `fork` this one waits for
        self.fork = 0
        self.forget()
        if progress:
            self.inserted = progress.computed
            self.drawn = len(progress.generated)
            for token in progress.generated:
                self.add_token(token)

    def forget(self) -> None:
        """Holds nothing on the device."""
        self.slot = 0
        self.table = np.zeros(0, np.int32)  # virtual pages
        self.held = 0  # pages in the table; the first node.end of them belong to the tree
        self.node: Node | None = None
        self.computed = self.prefill_end = self.write_from = self.branch = 0
        self.collected = 0  # tokens whose steps are complete: states kept up to there are in the tree
        self.forks: list[int] = []  # lengths at which waiting requests branch off
        self.track: Node | None = None  # the last state kept while decoding

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def length(self) -> int:
        """Tokens once all steps in flight are done."""
        return self.prompt_length + self.drawn

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        return self.request.sampling.max_new_tokens - self.drawn

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prefill_end

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        if self.items is not self.tokens:
            self.items.append(token)

    def page_keys(self, page: int) -> list[bytes]:
        extend_keys(self.keys, self.items, page, self.request.namespace)
        return self.keys

    def admit(self, slot: int, table: list[int], match: Match, page: int) -> None:
        pages = -(-(self.prompt_length + self.request.sampling.max_new_tokens) // page)
        self.table = np.zeros(pages, np.int32)
        self.table[: len(table)] = table
        self.held, self.slot = len(table), slot
        self.prefill_end = len(self.tokens)
        self.leader = None
        self.computed = self.inserted or match.resume * page
        self.write_from = match.pages * page
        self.node = match.node
