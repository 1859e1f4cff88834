"""The application under uvicorn on loopback: the official client, vanishing clients, signals."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import httpx
import jsonschema
import openai
import pytest

from serve.http.app import create_app
from serve.http.options import Options
from serve.http.server import Server, listen
from tests.serve.http.fake import Fake

TURN = "Plan.<|close|>think<|sep|><|open|>response<|sep|>The answer is 12.<|close|>response<|sep|>"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
HI = [{"role": "user", "content": "Hi"}]


@contextlib.contextmanager
def serving(fake, **options):
    """Base URL of a server in a thread."""
    sock = listen("127.0.0.1", 0)
    server = Server(create_app(fake, fake.tok, Options(**options)), drain=1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def served(tok):
    fake = Fake(tok)
    with serving(fake, api_key="sesame", max_body_bytes=100_000) as url:
        yield fake, url


@pytest.fixture
def fake(served):
    fake, _ = served
    fake.__init__(fake.tok)
    fake.script = lambda request: TURN
    return fake


@pytest.fixture
def api(served, fake):
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="sesame", max_retries=0) as client:
        yield client


def test_chat(api, fake):
    fake.cached = 4
    answer = api.chat.completions.create(model="nano", messages=HI, max_completion_tokens=100, seed=1)
    message = answer.choices[0].message
    assert (message.role, message.content, message.reasoning_content) == ("assistant", "The answer is 12.", "Plan.")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.usage.completion_tokens_details.reasoning_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streaming(api, fake):
    stream = api.chat.completions.create(model="nano", messages=HI, stream=True, logprobs=True, top_logprobs=1)
    reasoning = content = ""
    tokens, usage, finish = [], None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasoning += choice.delta.reasoning_content or ""
            content += choice.delta.content or ""
            tokens += choice.logprobs.content if choice.logprobs else []
            finish = choice.finish_reason or finish
    assert (reasoning, content, finish) == ("Plan.", "The answer is 12.", "stop")
    assert usage.completion_tokens == len(tokens) + 1
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == TURN


def test_the_clients_own_accumulation(api, fake):
    with api.chat.completions.stream(model="nano", messages=HI, tools=[WEATHER], tool_choice="required") as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    [choice] = final.choices
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])


def test_a_conversation_with_tools(api, fake, tok):
    answer = api.chat.completions.create(
        model="nano",
        messages=HI,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        parallel_tool_calls=False,
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.id == "get_weather:0"
    results = [{"role": "tool", "tool_call_id": call.id, "content": "18C"}]
    follow = [*HI, answer.choices[0].message.model_dump(exclude_none=True), *results]
    assert api.chat.completions.create(model="nano", messages=follow).choices[0].message.content == "The answer is 12."
    city = json.loads(call.function.arguments)["city"]
    assert f' key="city" type="string"<|sep|>{city}<|close|>argument<|sep|>' in tok.decode(fake.requests[-1].prompt)


def test_structured_output(api, fake):
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string"}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    for extra in ({}, {"extra_body": {"thinking": {"type": "disabled"}}}):
        answer = api.chat.completions.create(model="nano", messages=HI, response_format=form, **extra)
        jsonschema.validate(json.loads(answer.choices[0].message.content), schema)


def test_completions_and_models(api, fake):
    fake.script = lambda request: " world"
    assert api.completions.create(model="nano", prompt="hello").choices[0].text == " world"
    pieces = api.completions.create(model="nano", prompt=["a", "b"], stream=True)
    texts = ["", ""]
    for chunk in pieces:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [" world"] * 2
    assert [model.id for model in api.models.list()] == ["nano"]
    assert api.models.retrieve("nano").id == "nano"


@pytest.mark.parametrize("stream", [False, True])
def test_errors(api, served, fake, stream):
    def create(**body):
        return api.chat.completions.create(**{"model": "nano", "messages": HI, "stream": stream, **body})

    with pytest.raises(openai.BadRequestError, match="temperature is 9") as error:
        create(temperature=9)
    assert (error.value.param, error.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as error:
        create(model="gpt")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        api.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.APIStatusError) as error:
        create(messages=[{"role": "user", "content": "a" * 100_000}])
    assert error.value.status_code == 413
    fake.error = RuntimeError("secret")
    with pytest.raises(openai.InternalServerError):
        create()


def test_an_error_inside_a_stream(api, fake):
    fake.fails_after = 9
    with pytest.raises(openai.APIError, match="internal error"):
        for _ in api.chat.completions.create(model="nano", messages=HI, stream=True):
            pass


def wait_for(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stage", ["queued", "streaming", "plain"])
def test_a_vanished_client_aborts_its_request(served, fake, stage, n):
    fake.script, fake.pause, fake.step = (lambda request: "x" * 100_000), 0.001, 1
    if stage == "queued":
        fake.hang = asyncio.Event()
    body = {"messages": HI, "stream": stage != "plain", "n": n, "max_tokens": 90_000}
    with httpx.Client(base_url=served[1], headers={"Authorization": "Bearer sesame"}) as http:
        if stage == "streaming":
            with http.stream("POST", "/v1/chat/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/chat/completions", json=body, timeout=0.2)
    wait_for(lambda: fake.running == 0)
    assert len(fake.requests) == fake.closed == n
    fake.hang, fake.script, fake.pause = None, (lambda request: TURN), 0
    headers = {"Authorization": "Bearer sesame"}
    info = httpx.get(f"{served[1]}/server_info", headers=headers).json()
    assert info["http"]["active"] == 0 and info["http"]["num_aborted_requests_total"] >= n


def test_clients_that_vanish_at_random(tok):
    """60 requests of all kinds at once, most of them dropped at some point: nothing keeps running."""
    fake = Fake(tok, script=lambda request: "word " * 50, pause=0.001, step=5)
    rng = random.Random(0)

    async def one(http, patience):
        kind = rng.choice(("/v1/chat/completions", "/v1/completions", "/generate"))
        body = {
            "/v1/chat/completions": {"messages": HI, "n": 2},
            "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 200},
            "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 200}},
        }[kind]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                response = await http.post(kind, json={**body, "stream": rng.random() < 0.5})
                return response.status_code
        return None

    async def all_of_them(url):
        async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=60), timeout=30) as http:
            return await asyncio.gather(*(one(http, rng.choice((0.01, 0.05, 0.1, 20))) for _ in range(60)))

    with serving(fake) as url:
        statuses = asyncio.run(all_of_them(url))
        wait_for(lambda: fake.running == 0)
        assert httpx.get(f"{url}/server_info").json()["http"]["active"] == 0
    assert 200 in statuses and None in statuses and set(statuses) == {200, None}


PROGRAM = """
import sys
from pathlib import Path
from k3jax.chat.tokenizer import Tokenizer
from serve.http.app import create_app
from serve.http.server import listen, run
from tests.serve.http.fake import Fake
fake = Fake(Tokenizer(Path(sys.argv[1])), script=lambda request: "x" * 40, pause=0.02, step=1)
sock = listen("127.0.0.1", 0)
print(sock.getsockname()[1], flush=True)
run(create_app(fake, fake.tok), sock, drain=10)
print("left", fake.running, flush=True)
"""


@pytest.mark.slow  # another interpreter
def test_sigterm_lets_running_requests_end(tok):
    command = [sys.executable, "-c", PROGRAM, str(tok.folder)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        body = {"messages": HI, "stream": True, "thinking": {"type": "disabled"}}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{url}/ready").status_code == 503)
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 503
            text = "".join(lines)
        assert text.count('"content":"x"') >= 38 and text.endswith("data: [DONE]")
        assert process.wait(10) == 0
        assert process.stdout.read().strip() == "left 0"
    finally:
        process.kill()
        process.communicate()


def test_a_taken_port_is_named():
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    with pytest.raises(OSError, match=f"127.0.0.1:{port}.*--port"):
        listen("127.0.0.1", port)
    sock.close()
