"""Who gets in, how much, and what happens to requests that are no requests."""

import asyncio

import pytest

from tests.serve.http.fake import Fake, chat, client

pytestmark = pytest.mark.anyio


@pytest.fixture
def fake(tok):
    return Fake(tok, script=lambda request: "héllo")


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic sesame", "sesame", "Bearer ", "Bearer sésame"])
async def test_keys(fake, header):
    headers = {} if header is None else {"Authorization": header.encode()}
    async with client(fake, api_key="sesame", admin_key="crypt") as c:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/flush_cache")):
            response = await c.request(method, path, headers=headers)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/metrics", "/", "/docs"):
            assert (await c.get(path, headers=headers)).status_code == 200
        key = {"Authorization": "Bearer sesame"}
        assert (await c.get("/v1/models", headers=key)).status_code == 200
        assert (await c.post("/flush_cache", headers=key)).status_code == 401
        assert (await c.post("/flush_cache", headers={"Authorization": "bearer crypt"})).status_code == 200


async def test_cors_is_off_unless_configured(fake):
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with client(fake) as c:
        assert "access-control-allow-origin" not in (await c.get("/v1/models", headers=ask)).headers
    async with client(fake, cors_origins=("https://a.example",), api_key="k") as c:
        preflight = await c.options("/v1/models", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        other = await c.options("/v1/models", headers={**ask, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_sizes_and_concurrency(fake):
    async with client(fake, max_body_bytes=1000, max_concurrent=2) as c:
        assert (await chat(c, content="a" * 1000)).status_code == 413

        async def pieces():
            for _ in range(20):
                yield b" " * 100

        chunked = await c.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})
        assert chunked.status_code == 413 and chunked.json()["error"]["type"] == "invalid_request_error"
        fake.hang = asyncio.Event()
        running = [asyncio.create_task(chat(c, stream=bool(i))) for i in range(2)]
        while fake.running < 2:
            await asyncio.sleep(0)
        for stream in (False, True):
            refused = await chat(c, stream=stream)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        fake.hang.set()
        assert [response.status_code for response in await asyncio.gather(*running)] == [200, 200]
        assert (await chat(c)).status_code == 200


async def test_draining(fake):
    fake.hang = asyncio.Event()
    async with client(fake) as c:
        running = asyncio.create_task(chat(c))
        while not fake.running:
            await asyncio.sleep(0)
        assert not await c.service.drain(0.01)
        drained = asyncio.create_task(c.service.drain())
        assert [(await c.get(path)).status_code for path in ("/health", "/ready")] == [503, 503]
        assert (await chat(c)).status_code == 503
        assert not drained.done()
        fake.hang.set()
        assert (await running).status_code == 200
        assert await drained


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"{", {}),
        (b"", {}),
        (b"null", {}),
        (b"[]", {}),
        (b'"a"', {}),
        (b"\xff\xfe", {}),
        (b"[" * 100_000, {}),
        (b'{"messages": ' + b"9" * 5000 + b"}", {}),
        (b'{"messages": [{"role": "user", "content": "q"}], "temperature": NaN}', {}),
        (b'{"messages": [{"role": "user", "content": "q"}], "temperature": 1e999}', {}),
        (b'{"messages": [{"role": "user", "content": "q"}], "model": "\\ud800"}', {}),
        (b'{"messages": [{"role": "user", "content": "q"}]}', {"Content-Type": "text/plain"}),
    ],
)
async def test_broken_bodies(fake, content, headers):
    async with client(fake) as c:
        response = await c.post(
            "/v1/chat/completions", content=content, headers={"Content-Type": "application/json", **headers}
        )
    assert response.status_code in (400, 404)
    assert response.json()["error"]["message"]


async def test_lone_surrogates_are_harmless(fake):
    body = b'{"messages": [{"role": "user", "content": "\\ud800"}], "stop": "\\ud800"}'
    async with client(fake) as c:
        for path in ("/v1/chat/completions", "/tokenize"):
            response = await c.post(path, content=body, headers={"Content-Type": "application/json"})
            assert response.status_code in (200, 400)
