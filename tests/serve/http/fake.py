"""A scripted engine and a client without sockets."""

import asyncio
import functools
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from serve.http.app import create_app
from serve.http.backend import Limits, Tokens, Unavailable
from serve.http.options import Options
from serve.http.service import Service
from tests.k3jax.chat.outputs import tokens
from tests.serve.http.walker import walk

VOCAB = 520  # the model's vocabulary is padded beyond the tokenizer's


def ids_of(tok, text):
    """Ids of an output whose control tokens are spelled."""
    return [i for part, control in tokens(text) for i in ([tok.special[part]] if control else tok.encode(part))]


@dataclass
class Fake:
    """Says `script(request)`: a text with spelled control tokens, or ids; then a stop id, unless `end` says otherwise.

    A request with a grammar gets a random walk through it instead. `step` ids come per item, `pause` seconds apart.
    """

    tok: object
    script: Callable = lambda request: "<|close|>think<|sep|><|open|>response<|sep|>Hi.<|close|>response<|sep|>"
    end: str = "stop"
    step: int = 3
    pause: float = 0.0
    cached: int = 0
    limit: int = 100_000
    hang: asyncio.Event | None = None  # nothing comes before it is set
    error: Exception | None = None
    fails_after: int | None = None
    up: bool = True
    requests: list = field(default_factory=list)
    running: int = 0
    closed: int = 0  # generators closed before their end
    flushed: int = 0
    adapters: dict = field(default_factory=dict)
    refuses: Exception | None = None  # what loading an adapter raises

    async def generate(self, request):
        self.requests.append(request)
        if self.error:
            raise self.error
        self.running += 1
        ended = False
        try:
            if self.hang:
                await self.hang.wait()
            ids, reason = self._ids(request)
            for at in range(0, max(len(ids), 1), self.step):
                part = ids[at : at + self.step]
                if self.fails_after is not None and at >= self.fails_after:
                    raise RuntimeError("secret inside")
                await asyncio.sleep(self.pause)
                ended = at + self.step >= len(ids)
                top = None
                if request.sampling.logprobs is not None:
                    top = [{id: -0.5, (id + 1) % VOCAB: float("-inf")} for id in part]
                yield Tokens(part, [-0.5] * len(part), top, reason if ended else None, self.cached)
        finally:
            self.running -= 1
            self.closed += not ended

    def _ids(self, request):
        if request.grammar is not None:
            ids = walk(self.tok, request.grammar, seed=request.sampling.seed)
        else:
            said = self.script(request)
            ids = ids_of(self.tok, said) if isinstance(said, str) else said
        reason = self.end
        if reason == "stop" and request.sampling.stop_ids:
            ids = [*ids, request.sampling.stop_ids[0]]
        if len(ids) > request.sampling.max_new_tokens:
            ids, reason = ids[: request.sampling.max_new_tokens], "length"
        return ids, reason

    def limits(self):
        return Limits(VOCAB, 1_000_000, self.limit)

    def stats(self):
        return {
            "num_running_reqs": self.running,
            "num_queue_reqs": 0,
            "evicted_tokens_total": 7,
            "cache_hit_rate": 0.25,
            "pool": {"bytes": 1000, "state_bytes": 300, "page_bytes": 500},
            "started": True,
        }

    async def flush_cache(self):
        if self.running:
            raise Unavailable("requests are running; wait for them")
        self.flushed += 1

    async def load_adapter(self, name, path):
        if self.refuses:
            raise self.refuses
        self.adapters[name] = path

    async def unload_adapter(self, name):
        del self.adapters[name]

    def ready(self):
        return self.up


@functools.cache
def _routes(tok, options):
    """An application to put other engines behind: building one takes longer than most tests."""
    return create_app(Fake(tok), tok, options)


@asynccontextmanager
async def client(fake, **options):
    options = Options(**options)
    app = _routes(fake.tok, options)
    app.state.service = Service(fake, fake.tok, options)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as c:
        c.app = app
        c.service = app.state.service
        yield c


async def chat(c, content="Hi", **body):
    messages = body.pop("messages", [{"role": "user", "content": content}])
    return await c.post("/v1/chat/completions", json={"messages": messages, **body})


def events(response):
    """The JSON of a stream's events, after checking its frame."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = [part for part in response.text.split("\n\n") if not part.startswith(":")]
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-2])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def assemble(chunks):
    """The chat completion that chunks add up to, as a client would: names and arguments are concatenated."""
    choices, usage = {}, None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            own = choices.setdefault(
                choice["index"],
                {"content": "", "reasoning_content": "", "calls": {}, "finish_reason": None, "tokens": []},
            )
            delta = choice["delta"]
            own["content"] += delta["content"] or ""
            own["reasoning_content"] += delta["reasoning_content"] or ""
            for call in delta.get("tool_calls", ()):
                made = own["calls"].setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                made["id"] += call.get("id", "")
                made["name"] += call["function"].get("name", "")
                made["arguments"] += call["function"].get("arguments", "")
            own["tokens"] += (choice["logprobs"] or {}).get("content", [])
            if choice["finish_reason"]:
                assert own["finish_reason"] is None
                own["finish_reason"] = choice["finish_reason"]
                own["matched_stop"] = choice["matched_stop"]
    return [choices[i] for i in sorted(choices)], usage


async def answer(c, stream, **body):
    """(choices, usage) of a request that succeeds, in the form of `assemble`, streaming or not."""
    response = await chat(c, stream=stream, **body)
    assert response.status_code == 200, response.text
    if stream:
        return assemble(events(response))
    out = []
    for choice in response.json()["choices"]:
        message = choice["message"]
        calls = {i: {"id": call["id"], **call["function"]} for i, call in enumerate(message.get("tool_calls", ()))}
        out.append(
            {
                "content": message["content"],
                "reasoning_content": message["reasoning_content"] or "",
                "calls": calls,
                "finish_reason": choice["finish_reason"],
                "tokens": (choice["logprobs"] or {}).get("content", []),
                "matched_stop": choice["matched_stop"],
            }
        )
    return out, response.json()["usage"]
