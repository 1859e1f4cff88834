"""Runs the application under uvicorn until a signal, then lets running requests end."""

import asyncio
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from serve.http.service import Service


class Server(uvicorn.Server):
    """A first SIGINT or SIGTERM drains: requests that come later get 503, running ones have `drain` seconds.

    A second one, or the end of that time, closes what is left, which aborts those requests.
    """

    def __init__(self, app: FastAPI, drain: float, access_log: bool = False):
        self._service: Service = app.state.service
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            app, access_log=access_log, log_level="info", timeout_graceful_shutdown=1, lifespan="off"
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining:
            super().handle_exit(sig, frame)
        else:
            self._service.draining = True
            asyncio.get_running_loop().call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._draining = asyncio.create_task(self._stop_when_idle())

    async def _stop_when_idle(self) -> None:
        await self._service.drain(self._drain)
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free one. OSError names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise OSError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port") from None
    return sock


def run(app: FastAPI, sock: socket.socket, drain: float = 30.0, access_log: bool = False) -> None:
    """Serve on a listening socket until SIGINT or SIGTERM."""
    Server(app, drain, access_log).run(sockets=[sock])
