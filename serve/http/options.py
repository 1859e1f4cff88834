"""How the server behaves: one frozen object, filled from the command line."""

import argparse
import dataclasses
from dataclasses import dataclass

from k3jax.chat.messages import EFFORTS


@dataclass(frozen=True)
class Options:
    """Sizes in bytes, times in seconds. Without `admin_key` the admin routes take `api_key`; without that, anyone."""

    model_name: str = "nano"
    strict_k3_params: bool = False
    api_key: str | None = None
    admin_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    max_concurrent: int = 512
    keep_alive: float = 15.0
    health_timeout: float = 20.0
    temperature: float = 1.0
    top_p: float = 1.0
    effort: str | None = "max"
    whole_tool_calls: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (("temperature", 0.0, 2.0), ("top_p", 1e-6, 1.0)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"default {name} is {value}, allowed is {low} to {high}; choose a value in that range")
        for name in ("max_body_bytes", "max_concurrent", "keep_alive", "health_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, the minimum is above 0; choose a larger one")
        if "" in (self.api_key, self.admin_key):
            raise ValueError("an empty key lets anyone in; give a longer one or leave the option out")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `Options`, each with its default."""
    defaults = Options()

    def add(name: str, help: str, **how) -> None:
        default = getattr(defaults, name)
        shown = "none" if default is None or default == () else "off" if default is False else default
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, dest=name, default=default, help=f"{help} (default: {shown})", **how)

    add("model_name", "name of the model in /v1/models and in requests", metavar="NAME")
    add("strict_k3_params", "refuse sampling parameters that K3 was not meant for", action="store_true")
    add("api_key", "bearer key that every request needs", metavar="KEY")
    add("admin_key", "bearer key of the admin routes, instead of the API key", metavar="KEY")
    add("cors_origins", "origins whose pages may call the server", nargs="+", metavar="ORIGIN")
    add("max_body_bytes", "largest request body", type=int, metavar="N")
    add("max_concurrent", "most requests at the same time; the next one gets status 429", type=int, metavar="N")
    add("keep_alive", "seconds without an event after which a stream sends a comment", type=float, metavar="S")
    add("health_timeout", "seconds that /health waits for any token", type=float, metavar="S")
    add("temperature", "of requests that give none", type=float)
    add("top_p", "of requests that give none", type=float)
    add("effort", "thinking effort of requests that give none", choices=(*EFFORTS, "none"))
    add("whole_tool_calls", "stream a tool call once it is complete, not while it is written", action="store_true")


def options_from(args: argparse.Namespace) -> Options:
    """`Options` of parsed arguments; ValueError as in `Options`."""
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(Options)}
    values["cors_origins"] = tuple(values["cors_origins"])
    values["effort"] = None if values["effort"] == "none" else values["effort"]
    return Options(**values)
