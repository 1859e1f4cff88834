"""Routes that are not chat: completions, /generate, text, models, adapters, numbers, health."""

import asyncio
import re

import pytest

from k3jax.chat.messages import EFFORTS
from serve.http.app import create_app
from serve.http.backend import Unavailable
from serve.http.options import Options
from tests.serve.http.fake import VOCAB, Fake, chat, client, events

pytestmark = pytest.mark.anyio


@pytest.fixture
def fake(tok):
    return Fake(tok, script=lambda request: "héllo")


async def post(c, path, **body):
    return await c.post(path, json=body)


async def complete(c, **body):
    """(choices, usage) in one form for both stream modes."""
    response = await post(c, "/v1/completions", **body)
    if not body.get("stream"):
        assert response.status_code == 200, response.text
        return response.json()["choices"], response.json()["usage"]
    choices, usage = {}, None
    for chunk in events(response):
        assert chunk["object"] == "text_completion"
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            own = choices.setdefault(choice["index"], {**choice, "text": "", "logprobs": None})
            own["text"] += choice["text"]
            own["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"]:
                own["logprobs"] = own["logprobs"] or {key: [] for key in choice["logprobs"]}
                for key, values in choice["logprobs"].items():
                    own["logprobs"][key] += values
    return [choices[i] for i in sorted(choices)], usage


STREAMS = pytest.mark.parametrize("stream", [False, True])


@STREAMS
@pytest.mark.parametrize(
    ("prompt", "count"), [("abc", 1), (["abc", "de"], 2), ([5, 6], 1), ([[5, 6], [7]], 2), (["abc"], 1)]
)
async def test_completions(fake, tok, stream, prompt, count):
    async with client(fake) as c:
        choices, usage = await complete(c, prompt=prompt, stream=stream, n=2)
    parts = (
        prompt if isinstance(prompt[0], list) or isinstance(prompt, list) and isinstance(prompt[0], str) else [prompt]
    )
    prompts = [tuple(tok.encode(part) if isinstance(part, str) else part) for part in parts]
    assert [request.prompt for request in fake.requests] == [ids for ids in prompts for _ in range(2)]
    assert [choice["text"] for choice in choices] == ["héllo"] * 2 * count
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    assert usage["prompt_tokens"] == sum(map(len, prompts))
    assert usage["completion_tokens"] == 2 * count * (6 + 1)


@STREAMS
async def test_completion_echo_and_length(fake, stream):
    async with client(fake) as c:
        [choice], _ = await complete(c, prompt="abc", stream=stream, echo=True, max_tokens=4)
    assert (choice["text"], choice["finish_reason"]) == ("abchél", "length")


@STREAMS
async def test_completion_logprobs(fake, stream):
    async with client(fake) as c:
        [choice], _ = await complete(c, prompt="abc", stream=stream, logprobs=2)
    got = choice["logprobs"]
    assert got["token_logprobs"] == [-0.5] * 6
    assert "".join(got["tokens"][:1] + got["tokens"][3:]) == "hllo"
    assert got["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert got["top_logprobs"][0]["h"] == -0.5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": ["a"] * 70, "n": 2}, "n"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({}, "prompt"),
    ],
)
async def test_bad_completions(fake, fields, param):
    async with client(fake) as c:
        response = await post(c, "/v1/completions", **fields)
    assert response.status_code == 400 and response.json()["error"]["param"].split(".")[0] == param


async def test_generate(fake, tok):
    async with client(fake) as c:
        one = (await post(c, "/generate", text="ab", rid="r1", return_logprob=True, top_logprobs_num=1)).json()
        two = (await post(c, "/generate", input_ids=[[5], [6, 7]], sampling_params={"max_new_tokens": 4})).json()
        streamed = events(await post(c, "/generate", text="ab", stream=True))
    assert one["text"] == "héllo" and one["output_ids"] == tok.encode("héllo")
    meta = one["meta_info"]
    assert meta["id"] == "r1" and meta["finish_reason"] == {"type": "stop", "matched": tok.stop_ids[0]}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 7, 0)
    assert meta["output_token_logprobs"] == [[-0.5, id, None] for id in one["output_ids"]]
    assert [result["text"] for result in two] == ["hél"] * 2
    assert [result["meta_info"]["prompt_tokens"] for result in two] == [1, 2]
    assert two[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    texts = [result["text"] for result in streamed]
    assert texts[-1] == "héllo" and all(later.startswith(text) for text, later in zip(texts, texts[1:], strict=False))


async def test_generate_follows_grammars(fake):
    async with client(fake) as c:
        for params in ({"regex": "[ab]{3}"}, {"ebnf": 'root ::= "a" "b" "a"'}, {"json_schema": '{"const": "aba"}'}):
            text = (await post(c, "/generate", text="q", sampling_params=params)).json()["text"]
            assert re.fullmatch('[ab]{3}|"aba"', text)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": "a", "input_ids": [1]},
        {"text": "a", "sampling_params": {"max_new_tokens": 0}},
        {"text": "a", "sampling_params": {"json_schema": "{"}},
        {"text": "a", "sampling_params": {"json_schema": "[]"}},
        {"text": "a", "sampling_params": {"json_schema": '{"type": "nonsense"}'}},
        {"input_ids": [-1]},
        {"input_ids": [0.5]},
    ],
)
async def test_bad_generate(fake, body):
    async with client(fake) as c:
        assert (await post(c, "/generate", **body)).status_code == 400


async def test_tokenize_and_back(fake, tok):
    async with client(fake) as c:
        text = (await post(c, "/tokenize", prompt="né<|open|>")).json()
        assert text == {"tokens": tok.encode("né<|open|>"), "count": 11, "max_model_len": fake.limit}
        turn = (await post(c, "/v1/tokenize", messages=[{"role": "user", "content": "Hi"}])).json()
        assert turn["tokens"] == tok.encode_chat([{"role": "user", "content": "Hi"}], effort="max")
        back = await post(c, "/detokenize", tokens=text["tokens"])
        assert back.json() == {"text": "né<|open|>"}
        skipped = await post(c, "/v1/detokenize", tokens=[*tok.encode("a"), *tok.stop_ids], skip_special_tokens=True)
        assert skipped.json() == {"text": "a"}
        for path, body in (("/detokenize", {"tokens": [VOCAB]}), ("/tokenize", {}), ("/tokenize", {"prompt": 3})):
            assert (await post(c, path, **body)).status_code == 400


async def test_models_and_adapters(fake):
    async with client(fake, model_name="base") as c:
        assert [m["id"] for m in (await c.get("/v1/models")).json()["data"]] == ["base"]
        loaded = await post(c, "/v1/load_lora_adapter", lora_name="a", lora_path="/adapters/a")
        assert loaded.json() == {"success": True, "error_message": "", "loaded_adapters": {"a": "/adapters/a"}}
        data = (await c.get("/v1/models")).json()["data"]
        assert [(m["id"], m["parent"], m["max_model_len"]) for m in data] == [
            ("base", None, fake.limit),
            ("a", "base", fake.limit),
        ]
        assert (await c.get("/v1/models/a")).json() == data[1]
        for fields in ({"model": "a"}, {"model": "base:a"}, {"lora_path": "a"}, {"model": "base"}, {}):
            assert (await chat(c, **fields)).status_code == 200
        assert [request.adapter for request in fake.requests] == ["a", "a", "a", None, None]
        for fields in ({"model": "b"}, {"model": "base:b"}, {"lora_path": "b"}, {"model": "x:a"}):
            response = await chat(c, **fields)
            assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
        assert (await c.get("/v1/models/b")).status_code == 404
        assert (await post(c, "/v1/unload_lora_adapter", lora_name="b")).status_code == 400
        unloaded = await post(c, "/v1/unload_lora_adapter", lora_name="a")
        assert unloaded.json()["loaded_adapters"] == {} == fake.adapters
        assert (await chat(c, model="a")).status_code == 404


@pytest.mark.parametrize(
    "error", [ValueError("rank 64 is above 32; use a smaller one"), NotImplementedError(), OSError("x")]
)
async def test_refused_adapters(fake, error):
    fake.refuses = error
    async with client(fake) as c:
        response = await post(c, "/v1/load_lora_adapter", lora_name="a", lora_path="/a")
        taken = await post(c, "/v1/load_lora_adapter", lora_name="nano", lora_path="/a")
    body = response.json()
    assert response.status_code == 400 and body["success"] is False and body["loaded_adapters"] == {}
    assert body["error_message"] == body["error"]["message"] != ""
    assert taken.status_code == 400


async def test_flush_cache(fake):
    async with client(fake) as c:
        assert (await c.post("/flush_cache")).json() == {"success": True}
        fake.running = 1
        assert (await c.post("/flush_cache")).status_code == 503
    assert fake.flushed == 1


async def test_metrics(fake, tok):
    app = create_app(fake, tok, Options())
    async with client(fake) as c:
        c._transport.app = app
        fake.cached = 2
        for stream in (False, True):
            await post(c, "/v1/completions", prompt="abc", stream=stream)
        await c.get("/nowhere")
        text = (await c.get("/metrics")).text
        info = (await c.get("/server_info")).json()
    for line in (
        "sglang:prompt_tokens_total 6.0",
        "sglang:generation_tokens_total 14.0",
        "sglang:cached_tokens_total 4.0",
        "sglang:num_requests_total 2.0",
        "sglang:num_aborted_requests_total 0.0",
        "sglang:time_to_first_token_seconds_count 2.0",
        "sglang:inter_token_latency_seconds_count 4.0",
        "sglang:e2e_request_latency_seconds_count 2.0",
        "sglang:cache_hit_rate 0.25",
        "sglang:evicted_tokens_total 7.0",
        "sglang:num_running_reqs 0.0",
        "sglang:http_requests_active 1.0",
        "sglang:http_requests_total 4.0",
        'sglang:http_responses_total{path="/v1/completions",status="200"} 2.0',
        'sglang:http_responses_total{path="other",status="404"} 1.0',
    ):
        assert line in text.splitlines(), line
    assert info["http"]["generation_tokens_total"] == 14
    assert info["engine"]["pool"] == {"bytes": 1000, "state_bytes": 300, "page_bytes": 500}
    assert info["limits"]["longest"] == fake.limit


async def test_server_info_keeps_keys_to_itself(fake):
    async with client(fake, api_key="sesame", admin_key="crypt") as c:
        text = (await c.get("/server_info", headers={"Authorization": "Bearer sesame"})).text
        assert "sesame" not in text and "crypt" not in text


async def test_health_and_readiness(fake):
    async with client(fake, health_timeout=0.3) as c:
        assert [(await c.get(path)).status_code for path in ("/health", "/ready", "/ping")] == [200, 200, 200]
        fake.hang = asyncio.Event()
        assert (await c.get("/health")).status_code == 503  # a hung engine
        assert (await c.get("/ready")).status_code == 200
        busy = asyncio.create_task(c.get("/health"))
        await asyncio.sleep(0.05)
        c.service.deliveries += 1  # a token for somebody else
        assert (await busy).status_code == 200
        fake.hang, fake.error = None, Unavailable("the queue is full")
        assert (await c.get("/health")).status_code == 503
        fake.error = None
        fake.up = False
        assert [(await c.get(path)).status_code for path in ("/health", "/ready")] == [503, 503]
        assert (await chat(c)).status_code == 503
    assert fake.running == 0


async def test_unknown_paths_and_methods(fake):
    async with client(fake) as c:
        assert (await c.get("/nowhere")).json()["error"]["type"] == "not_found_error"
        response = await c.get("/v1/chat/completions")
        assert response.status_code == 405 and response.json()["error"]["message"]
        assert response.headers["allow"] == "POST"


async def test_the_openapi_document(fake):
    async with client(fake) as c:
        document = (await c.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/health"} <= set(document["paths"])
    post = document["paths"]["/v1/chat/completions"]["post"]
    assert "422" not in post["responses"]
    assert {"application/json", "text/event-stream"} <= set(post["responses"]["200"]["content"])
    assert post["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody")
    effort = document["components"]["schemas"]["Thinking"]["properties"]["effort"]
    assert set(effort["anyOf"][0]["enum"]) == set(EFFORTS)
