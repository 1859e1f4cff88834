"""What all routes share: the engine, its limits, who may enter, and streams of tokens with their metrics."""

import asyncio
import dataclasses
import functools
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager

from k3jax.chat.tokenizer import Tokenizer
from serve.http.backend import Backend, Generate, Limits, Unavailable
from serve.http.errors import ApiError
from serve.http.grammar import Grammars, Matcher, Source
from serve.http.metrics import Metrics
from serve.http.options import Options
from serve.http.outputs import Output, Step
from serve.http.turn_grammar import Turn, turn_source

LONG_TEXT = 20_000  # characters from which tokenising leaves the event loop


class Service:
    """State of one server; lives in one event loop."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, options: Options):
        self.backend, self.tokenizer, self.options = backend, tokenizer, options
        self.metrics = Metrics(backend)
        self.grammars = Grammars(tokenizer, backend.limits().vocab_size)
        self._turn_sources = functools.lru_cache(maxsize=256)(self._turn_source)
        self.adapters: dict[str, str] = {}  # loaded ones: name -> path
        self.started = time.time()
        self.draining = False
        self.active = 0  # requests that generate
        self.deliveries = 0  # items of tokens from the engine so far: it lives
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def limits(self) -> Limits:
        return self.backend.limits()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Counts a generating request; refuses it while starting, draining or full."""
        if self.draining:
            raise Unavailable("the server is shutting down; send the request to another one")
        if not self.backend.ready():
            raise Unavailable("the engine is starting; try again in a few seconds")
        if self.active >= self.options.max_concurrent:
            raise ApiError(
                429,
                f"{self.active} requests are running, the limit is {self.options.max_concurrent}; try again later",
                code="rate_limit_exceeded",
            )
        self.active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if not self.active:
                self._idle.set()

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the running ones, at most `timeout` seconds; whether all have ended."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def adapter_of(self, model: str | None, lora_path: str | None) -> str | None:
        """The adapter that a request means by `model:adapter`, an adapter's name, or `lora_path`; 404 if unknown."""
        name = self.options.model_name
        base, _, adapter = (model or name).partition(":")
        if model in (None, "", name):
            adapter = ""
        elif model in self.adapters:
            adapter = model
        elif base != name or adapter not in self.adapters:
            known = ", ".join([name, *self.adapters])
            raise ApiError(404, f"model {model[:80]!r} is not served; use one of {known}", "model", "model_not_found")
        adapter = lora_path or adapter
        if adapter and adapter not in self.adapters:
            raise ApiError(
                404, f"adapter {adapter[:80]!r} is not loaded; load it first", "lora_path", "model_not_found"
            )
        return adapter or None

    async def matcher(self, build: Callable[[], Source], param: str) -> Matcher:
        """Compile a grammar off the event loop; 400 naming the field if it is none."""
        try:
            return await asyncio.to_thread(lambda: self.grammars.compile(build()))
        except ValueError as error:
            raise ApiError(400, f"{param} cannot be used: {error}; correct it", param) from None

    def turn_source(self, turn: Turn) -> Source:
        """The turn's grammar; agents send the same tools again and again, so it is remembered."""
        return self._turn_sources(json.dumps(dataclasses.asdict(turn)))

    def _turn_source(self, turn: str) -> Source:
        return turn_source(Turn(**json.loads(turn)), self.tokenizer, self.grammars.error)

    async def offload[T](self, size: int, work: Callable[[], T]) -> T:
        """Work on `size` characters of text, in a thread if they are many."""
        return await asyncio.to_thread(work) if size > LONG_TEXT else work()

    async def stream(self, request: Generate, output: Output) -> AsyncGenerator[Step, None]:
        """What each delivery of the engine adds to an output, until that is finished; measured."""
        metrics = self.metrics
        start = last = time.perf_counter()
        metrics.requests.inc()
        first = True
        try:
            async with aclosing(self.backend.generate(request)) as items:
                async for item in items:
                    now = time.perf_counter()
                    self.deliveries += 1
                    if first:
                        metrics.first_token.observe(now - start)
                        metrics.prompt_tokens.inc(len(request.prompt))
                        metrics.cached_tokens.inc(item.cached_tokens)
                    else:
                        metrics.between_tokens.observe(now - last)
                    first, last = False, now
                    metrics.generation_tokens.inc(len(item.ids))
                    yield output.feed(item)
                    if output.finish_reason is not None:
                        return
            raise RuntimeError("the engine ended a sequence without a finish reason")
        except (GeneratorExit, asyncio.CancelledError):
            if output.finish_reason is None:
                metrics.aborted.inc()
            raise
        finally:
            metrics.whole.observe(time.perf_counter() - start)


async def merge[T](streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several streams as they come, each with its stream's index; closing closes all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            got = await queue.get()
            if got is None:
                running -= 1
            elif isinstance(got, BaseException):
                raise got
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
