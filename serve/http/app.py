"""The FastAPI application around one engine."""

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

from k3jax.chat.tokenizer import Tokenizer
from serve.http import admin, chat, completions, generate, text
from serve.http.backend import Backend
from serve.http.errors import add_error_handlers
from serve.http.middleware import Gate
from serve.http.options import Options
from serve.http.schemas import ErrorBody
from serve.http.service import Service

STATIC = Path(__file__).parent / "static"
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 429, 500, 503)
}


def create_app(backend: Backend, tokenizer: Tokenizer, options: Options | None = None) -> FastAPI:
    """An application whose `state.service` is its `Service`."""
    options = options or Options()
    app = FastAPI(title="k3jax", description="Kimi K3 behind OpenAI's API.", responses=ERRORS)
    app.state.service = service = Service(backend, tokenizer, options)
    for router in (chat.router, completions.router, generate.router, text.router, admin.router):
        app.include_router(router)
    app.add_api_route("/", _page, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    add_error_handlers(app)
    if options.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=options.cors_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Gate, options=options, metrics=service.metrics)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


async def _page() -> FileResponse:
    headers = {"Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'"}
    return FileResponse(STATIC / "index.html", headers=headers)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document without status 422, which this server sends as 400."""
    if app.openapi_schema is None:
        app.openapi_schema = get_openapi(title=app.title, version="1", description=app.description, routes=app.routes)
        for operations in app.openapi_schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
    return app.openapi_schema
