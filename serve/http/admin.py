"""Models, adapters, the cache, numbers, and whether the server lives."""

import asyncio
import dataclasses
import time
from contextlib import aclosing
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from serve.http.backend import Generate, Sampling, Unavailable
from serve.http.errors import ApiError, error_body
from serve.http.format import service_of
from serve.http.schemas import AdapterReply, LoadAdapterRequest, UnloadAdapterRequest
from serve.http.service import Service

router = APIRouter(tags=["Server"])
SECRETS = ("api_key", "admin_key")


@router.get("/v1/models", tags=["OpenAI"])
async def models(request: Request) -> dict[str, Any]:
    """The served model and the loaded adapters."""
    service = service_of(request)
    name = service.options.model_name
    return {"object": "list", "data": [_model(service, name), *(_model(service, a, name) for a in service.adapters)]}


@router.get("/v1/models/{model:path}", tags=["OpenAI"])
async def model(request: Request, model: str) -> dict[str, Any]:
    """One of them."""
    service = service_of(request)
    adapter = service.adapter_of(model, None)
    name = service.options.model_name
    return _model(service, adapter, name) if adapter else _model(service, name)


def _model(service: Service, id: str, parent: str | None = None) -> dict[str, Any]:
    return {
        "id": id,
        "object": "model",
        "created": int(service.started),
        "owned_by": "k3jax",
        "root": parent or id,
        "parent": parent,
        "max_model_len": service.limits.longest,
    }


@router.get("/health_generate", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """200 once the engine delivers any token, for a request of anyone or for the one sent here."""
    service = service_of(request)
    if service.draining or not service.backend.ready():
        state = "shutting down" if service.draining else "starting"
        raise Unavailable(f"the server is {state}; ask another one or try again later")
    timeout = service.options.health_timeout
    try:
        async with asyncio.timeout(timeout):
            await _any_token(service)
    except TimeoutError:
        raise Unavailable(f"the engine gave no token within {timeout:g} seconds; restart it if that lasts") from None
    return JSONResponse({"status": "ok"})


async def _any_token(service: Service) -> None:
    seen = service.deliveries
    probe = asyncio.create_task(_probe(service))
    try:
        while not probe.done() and service.deliveries == seen:
            await asyncio.wait({probe}, timeout=0.1)
        if probe.done():
            probe.result()
    finally:
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)


async def _probe(service: Service) -> None:
    """One token of the engine's own; with a full queue, wait for somebody else's."""
    try:
        async with aclosing(service.backend.generate(Generate((0,), Sampling(max_new_tokens=1)))) as items:
            await anext(items)
    except Unavailable:
        await asyncio.Event().wait()


@router.get("/ping", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """200 while new requests are welcome."""
    service = service_of(request)
    if service.draining or not service.backend.ready():
        raise Unavailable("the server takes no requests now; ask another one or try again later")
    return {"status": "ready"}


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Prometheus's text format."""
    return Response(service_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/get_server_info", include_in_schema=False)
@router.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """Options, limits and live numbers."""
    service = service_of(request)
    options = {key: value for key, value in dataclasses.asdict(service.options).items() if key not in SECRETS}
    return {
        "version": _version(),
        "model": service.options.model_name,
        "uptime_seconds": time.time() - service.started,
        "options": options,
        "limits": {**dataclasses.asdict(service.limits), "longest": service.limits.longest},
        "adapters": service.adapters,
        "draining": service.draining,
        "http": {"active": service.active, **service.metrics.totals()},
        "engine": dict(service.backend.stats()),
    }


@router.get("/get_model_info", include_in_schema=False)
@router.get("/model_info")
async def model_info(request: Request) -> dict[str, Any]:
    """What is served."""
    service = service_of(request)
    return {
        "model_path": service.options.model_name,
        "tokenizer_path": service.tokenizer.folder.name,
        "is_generation": True,
        "vocab_size": service.tokenizer.vocab_size,
        "max_model_len": service.limits.longest,
    }


@router.post("/flush_cache")
async def flush_cache(request: Request) -> dict[str, bool]:
    """Forget cached prefixes; refused while requests run."""
    await service_of(request).backend.flush_cache()
    return {"success": True}


@router.post("/load_lora_adapter", include_in_schema=False)
@router.post("/v1/load_lora_adapter", response_model=AdapterReply)
async def load_lora_adapter(request: Request, body: LoadAdapterRequest) -> Response:
    """Load an adapter from a folder on the server, or replace the one of that name in place."""
    service = service_of(request)
    if body.lora_name == service.options.model_name:
        return _refused(service, f"adapter {body.lora_name} would hide the model; choose another name")
    try:
        await service.backend.load_adapter(body.lora_name, body.lora_path)
    except (ValueError, NotImplementedError, OSError) as error:
        return _refused(service, str(error) or "this server was started without adapter support; restart it with it")
    service.adapters[body.lora_name] = body.lora_path
    return _accepted(service)


@router.post("/unload_lora_adapter", include_in_schema=False)
@router.post("/v1/unload_lora_adapter", response_model=AdapterReply)
async def unload_lora_adapter(request: Request, body: UnloadAdapterRequest) -> Response:
    """Forget an adapter; requests that use it finish first."""
    service = service_of(request)
    if body.lora_name not in service.adapters:
        known = ", ".join(service.adapters) or "none"
        return _refused(service, f"adapter {body.lora_name[:80]!r} is not loaded (loaded: {known}); name one of those")
    try:
        await service.backend.unload_adapter(body.lora_name)
    except (ValueError, NotImplementedError) as error:
        return _refused(service, str(error))
    del service.adapters[body.lora_name]
    return _accepted(service)


def _accepted(service: Service) -> Response:
    return JSONResponse({"success": True, "error_message": "", "loaded_adapters": service.adapters})


def _refused(service: Service, message: str) -> Response:
    reply = {"success": False, "error_message": message, "loaded_adapters": service.adapters}
    return JSONResponse({**error_body(ApiError(400, message, "lora_name")), **reply}, 400)


def _version() -> str:
    try:
        return version("k3jax")
    except PackageNotFoundError:
        return "unknown"
