"""Prometheus metrics: what the HTTP layer sees itself, and the engine's numbers as they are when scraped."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from serve.http.backend import Backend

PREFIX = "sglang:"  # dashboards know these names (spec serving 8.7)
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One registry per server; the attributes are what handlers count."""

    def __init__(self, backend: Backend):
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=SECONDS, registry=registry)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of started sequences")
        self.generation_tokens = counter("generation_tokens", "Generated tokens")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that came from the prefix cache")
        self.requests = counter("num_requests", "Started sequences")
        self.aborted = counter("num_aborted_requests", "Sequences whose client went away")
        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token")
        self.between_tokens = histogram("inter_token_latency_seconds", "Time between deliveries of tokens")
        self.whole = histogram("e2e_request_latency_seconds", "Arrival to last token of a sequence")
        self.http_requests = counter("http_requests", "HTTP requests")
        self.http_responses = counter("http_responses", "HTTP responses", ("path", "status"))
        self.http_active = Gauge(PREFIX + "http_requests_active", "HTTP requests in progress", registry=registry)
        owned = {metric.name for metric in registry.collect()}
        registry.register(_EngineNumbers(backend, owned))

    def text(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)

    def totals(self) -> Mapping[str, float]:
        """The counters without labels, by their name in the text format."""
        return {
            f"{name}_total": counter._value.get()
            for name, counter in {
                "prompt_tokens": self.prompt_tokens,
                "generation_tokens": self.generation_tokens,
                "cached_tokens": self.cached_tokens,
                "num_requests": self.requests,
                "num_aborted_requests": self.aborted,
            }.items()
        }


class _EngineNumbers:
    """The numbers of `Backend.stats`; a name that ends in `_total` is a counter, any other a gauge."""

    def __init__(self, backend: Backend, owned: set[str]):
        self._backend, self._owned = backend, owned

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for name, value in self._backend.stats().items():
            full = PREFIX + name
            if not _is_number(value) or full.removesuffix("_total") in self._owned:
                continue
            text = f"{name.replace('_', ' ')} of the engine"
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(full, text, value=value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
