"""Who may call, how large a body may be, and counting; plain ASGI, so that disconnects reach the handlers."""

import hmac

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.http.errors import ApiError, error_response
from serve.http.metrics import Metrics
from serve.http.options import Options

OPEN_PATHS = frozenset(
    {"/", "/health", "/health_generate", "/ready", "/ping", "/metrics", "/docs", "/redoc", "/openapi.json"}
)
ADMIN_PATHS = frozenset({"/flush_cache"} | {f"{v}/{w}load_lora_adapter" for v in ("", "/v1") for w in ("", "un")})


class Gate:
    """Checks the key before anything of the body is read, then the body's size while it is read."""

    def __init__(self, app: ASGIApp, options: Options, metrics: Metrics):
        self.app, self.options, self.metrics = app, options, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        self.metrics.http_requests.inc()
        status = 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self.metrics.http_active.track_inprogress():
            try:
                await self._checked(scope, receive, counted)
            finally:
                path = getattr(scope.get("route"), "path", "other")  # of the route that was found on the way
                self.metrics.http_responses.labels(path, str(status)).inc()

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        refusal = self._refuse_key(scope, headers) or self._refuse_size(headers)
        if refusal is not None:
            return await refusal(scope, receive, send)
        await self.app(scope, _limited(receive, self.options.max_body_bytes), send)

    def _refuse_key(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        path = scope["path"]
        key = self.options.api_key
        if path in ADMIN_PATHS:
            key = self.options.admin_key or key
        if key is None or path in OPEN_PATHS or path.startswith("/static/") or scope["method"] == "OPTIONS":
            return None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), key.encode()):
            return None
        message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
        return error_response(ApiError(401, message, code="invalid_api_key"))

    def _refuse_size(self, headers: dict[bytes, bytes]) -> Response | None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.options.max_body_bytes:
            return error_response(_too_large(int(length[:20]), self.options.max_body_bytes))
        return None


def _limited(receive: Receive, limit: int) -> Receive:
    read = 0

    async def limited() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > limit:
            error = _too_large(read, limit)
            raise HTTPException(error.status, error.message)  # the kind that passes through body parsing
        return message

    return limited


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(413, f"the body has at least {size} bytes, the limit is {limit}; send less at a time")
