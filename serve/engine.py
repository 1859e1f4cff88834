"""The engine: one thread that plans, runs and answers, one step ahead of the device (spec serving 1.9)."""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

import jax

from k3jax.config import K3Config
from k3jax.params import Params
from serve.device import TOP, Layout
from serve.executor import Adjustment, Answer, Buckets, Executor, Pending
from serve.http.backend import Generate, Limits, Tokens, Unavailable
from serve.logits import Adjust
from serve.memory.host import HostMemory
from serve.memory.pool import StaticPool, UnifiedPool
from serve.scheduler import Scheduler
from serve.scheduler_check import check_request
from serve.scheduler_config import SchedulerConfig
from serve.types import FinishReason, Output, Request, SamplingParams, StepPlan, StepResult
from serve.types import Unavailable as Full


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Memory in bytes, lengths in tokens. `static_states` cuts the pool into fixed regions with so many KDA slots."""

    memory: int = 2**28
    host_memory: int = 0
    page: int = 64
    max_running: int = 16
    max_waiting: int = 4096
    max_length: int = 1024
    max_tokens: int = 512
    max_wait: float | None = None
    prefix_cache: bool = True
    static_states: int | None = None


class Engine:
    """`serve.http.backend.Backend` over one model. `start` compiles every shape and begins to serve."""

    def __init__(self, cfg: K3Config, params: Params, config: EngineConfig):
        self.cfg, self.config = cfg, config
        layout = Layout.of(cfg, config.page)
        geometry = layout.geometry(config.memory)
        length = min(config.max_length, cfg.max_position_embeddings)
        settings = SchedulerConfig(
            page=config.page,
            max_tokens=config.max_tokens,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_length=length,
            max_wait=config.max_wait,
            prefix_cache=config.prefix_cache,
        )
        pool = UnifiedPool(geometry) if config.static_states is None else StaticPool(geometry, config.static_states)
        host = HostMemory(config.host_memory, geometry) if config.host_memory else None
        self.scheduler = Scheduler(settings, pool, host)
        pages = -(-self.scheduler.max_request_tokens // config.page)
        self.executor = Executor(
            cfg, params, layout, geometry, Buckets.of(config.max_running, pages), config.max_running
        )
        self._live: dict[str, _Live] = {}
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._ready = self._stopping = False
        self._stats: Mapping[str, Any] = {}
        self._compilations = 0
        self._rate = _Rate()

    # The life of the engine

    @property
    def shapes(self) -> int:
        """Batch shapes that are compiled."""
        return len(self.executor.shapes())

    def warm_up(self) -> Iterator[None]:
        """Compile everything; an item per shape."""
        yield from self.executor.warm_up()
        jax.monitoring.register_event_duration_secs_listener(self._count_compilation)

    def _count_compilation(self, event: str, duration_secs: float, **_: Any) -> None:
        self._compilations += event.endswith("backend_compile_duration")

    def start(self) -> None:
        """Begin to serve; `warm_up` first, or the first requests wait for compilation."""
        self._publish()
        self._ready = True
        self._thread.start()

    def stop(self) -> None:
        """Finish the requests that are here, then end the thread."""
        self._commands.put(self._begin_stop)
        self._thread.join()

    def _begin_stop(self) -> None:
        self._stopping = True
        self.scheduler.drain()

    # The backend, called in event loops

    def limits(self) -> Limits:
        return Limits(self.cfg.vocab_size, self.cfg.max_position_embeddings, self.scheduler.max_request_tokens)

    def ready(self) -> bool:
        return self._ready

    def stats(self) -> Mapping[str, Any]:
        return self._stats

    async def generate(self, request: Generate) -> AsyncGenerator[Tokens, None]:
        """See `Backend.generate`."""
        if request.adapter is not None:
            raise ValueError(f"adapter {request.adapter!r} is not loaded; this server has the base model only")
        live = _Live(f"{next(self._ids)}", request, asyncio.get_running_loop())
        check_request(live.planned, self.scheduler.max_request_tokens)
        self._commands.put(lambda: self._submit(live))
        try:
            while True:
                item = await live.items.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._commands.put(lambda: self._abort(live.id))

    async def flush_cache(self) -> None:
        def flush() -> None:
            if self._live:
                raise Unavailable("requests are running; flush the cache when none is")
            self.scheduler.flush_cache()

        await self._in_thread(flush)

    async def load_adapter(self, name: str, path: str) -> None:
        raise NotImplementedError("this server has no adapter support; merge the adapter into the checkpoint")

    async def unload_adapter(self, name: str) -> None:
        raise NotImplementedError("this server has no adapter support, so none is loaded")

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """Run `work` in the engine's thread between two steps and wait for it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def command() -> None:
            try:
                work()
            except Exception as error:
                _call(loop, done.set_exception, error)
            else:
                _call(loop, done.set_result, None)

        self._commands.put(command)
        await done

    # The thread

    def _serve(self) -> None:
        try:
            self._loop()
        except Exception as error:  # a bug: tell everyone rather than let them wait
            for live in self._live.values():
                live.send(RuntimeError(f"the engine failed: {error!r}"))
            self._live.clear()
            raise
        finally:
            self._ready = False

    def _loop(self) -> None:
        steps: collections.deque[tuple[StepPlan, Pending]] = collections.deque()
        while True:
            self._obey(wait=not steps and self.scheduler.idle)
            if self._stopping and self.scheduler.idle:
                return
            plan = self.scheduler.schedule(time.monotonic())
            for finished in plan.finished:
                self._fail(finished.id, Unavailable("the request waited too long for memory; try again later"))
            steps.append((plan, self.executor.run(plan, self._adjustments(plan))))
            if plan.empty and len(steps) == 1:  # nothing fits until somebody leaves: look again for commands soon
                time.sleep(0.001)
            while len(steps) > 1 or (steps and plan.empty):  # an empty plan leaves nothing in flight
                self._complete(*steps.popleft())
            self._publish()

    def _obey(self, wait: bool) -> None:
        """Run the commands that came; with `wait` sleep until one does."""
        if wait:
            self._commands.get()()
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _submit(self, live: "_Live") -> None:
        try:
            self.scheduler.submit(live.planned, time.monotonic())
        except Full as error:
            live.send(Unavailable(str(error)))
        except ValueError as error:
            live.send(error)
        else:
            self._live[live.id] = live

    def _abort(self, id: str) -> None:
        self._live.pop(id, None)
        self.scheduler.finish(id, FinishReason.ABORT)

    def _fail(self, id: str, error: Exception) -> None:
        if live := self._live.pop(id, None):
            live.send(error)

    def _adjustments(self, plan: StepPlan) -> dict[int, Adjustment]:
        """What changes the logits of requests that ask for it, by their index in the plan."""
        out = {}
        for i, part in enumerate(plan.requests):
            live = self._live.get(part.request.id)
            if part.samples and live and live.adjust:
                out[i] = live.adjust.arrays(self.cfg.vocab_size)
        return out

    def _complete(self, plan: StepPlan, pending: Pending) -> None:
        answers = pending.fetch()
        drawn = [[answers[i].token] if part.samples else [] for i, part in enumerate(plan.requests)]
        by_id = {part.request.id: answers[i] for i, part in enumerate(plan.requests) if part.samples}
        for output in self.scheduler.complete(plan, StepResult(drawn)):
            self._rate.count += len(output.tokens)
            if live := self._live.get(output.id):
                live.answer(output, by_id[output.id])
                if output.reason is not None:
                    del self._live[output.id]

    def _publish(self) -> None:
        stats = self.scheduler.stats()
        counts, usage = stats.counts, stats.usage
        geometry = usage.geometry
        prompts = counts.get("prompt_tokens", 0)
        self._stats = {
            "num_running_reqs": stats.running,
            "num_queue_reqs": stats.waiting,
            "cache_hit_rate": counts.get("cached_tokens", 0) / prompts if prompts else 0.0,
            "gen_throughput": self._rate.value(),
            "num_retracted_reqs_total": counts.get("retracted", 0),
            "num_compilations_total": self._compilations,
            "pool": {
                "bytes": geometry.total,
                "state_bytes": (usage.states + usage.state_holes) * geometry.state,
                "page_bytes": (usage.pages + usage.page_holes) * geometry.page,
            },
            "cached_pages": stats.cached_pages,
            "cached_states": stats.cached_states,
            "counts": counts,
        }


class _Live:
    """A request in the engine and the event loop that waits for its tokens."""

    def __init__(self, id: str, request: Generate, loop: asyncio.AbstractEventLoop):
        how = request.sampling
        self.id, self.request, self.loop = id, request, loop
        self.items: asyncio.Queue[Tokens | Exception] = asyncio.Queue()
        self.adjust = Adjust.of(request)
        if how.logprobs is not None and not 0 <= how.logprobs <= TOP:
            raise ValueError(f"logprobs is {how.logprobs}, allowed is 0 to {TOP}; ask for fewer alternatives")
        self.planned = Request(
            id=id,
            prompt=request.prompt,
            sampling=SamplingParams(
                max_new_tokens=how.max_new_tokens,
                temperature=how.temperature,
                top_k=how.top_k,
                top_p=how.top_p,
                min_p=how.min_p,
                seed=how.seed,
                stop_ids=how.stop_ids,
                logprobs=how.logprobs,
                ignore_eos=how.ignore_eos,
            ),
            priority=request.priority,
            lockstep=self.adjust is not None and self.adjust.changes,
        )

    def answer(self, output: Output, drawn: Answer) -> None:
        """Hand over what one step drew: one token."""
        if self.adjust:
            self.adjust.accept(output.tokens)
        n = self.request.sampling.logprobs
        top = None
        if n is not None:
            pairs = zip(drawn.top_ids[:n].tolist(), drawn.top_logprobs[:n].tolist(), strict=True)
            top = [dict(pairs)]
        reason = output.reason
        self.send(
            Tokens(
                ids=output.tokens,
                logprobs=[drawn.logprob],
                top=top,
                finish_reason=None if reason is None else "stop" if reason is FinishReason.STOP else "length",
                cached_tokens=output.cached_tokens,
            )
        )

    def send(self, item: Tokens | Exception) -> None:
        _call(self.loop, self.items.put_nowait, item)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(function, *args)


class _Rate:
    """Events per second over the last seconds."""

    WINDOW = 2.0

    def __init__(self) -> None:
        self.count = 0
        self._before, self._since, self._value = 0, time.monotonic(), 0.0

    def value(self) -> float:
        now = time.monotonic()
        if now - self._since >= self.WINDOW:
            self._value = (self.count - self._before) / (now - self._since)
            self._before, self._since = self.count, now
        return self._value
