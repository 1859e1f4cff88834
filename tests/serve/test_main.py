"""`k3jax-serve` as a process: an OpenAI client gets answers, a signal ends it, bad flags get one sentence."""

import signal
import subprocess
import sys

import openai
import pytest

from serve.__main__ import main


@pytest.mark.slow
def test_a_client_is_served_until_a_signal(tmp_path):
    flags = "--port 0 --max-running 2 --max-length 256 --memory 0.01 --effort none --temperature 0".split()
    command = [sys.executable, "-m", "serve", *flags, "--compiled", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert line.startswith("nano is served on http://127.0.0.1:")
        client = openai.OpenAI(base_url=line.split()[4].rstrip(","), api_key="none", max_retries=0)
        ask = dict(model="nano", messages=[{"role": "user", "content": "23+45="}])
        whole = client.chat.completions.create(**ask)
        assert whole.choices[0].message.content == "68" and whole.choices[0].finish_reason == "stop"
        assert whole.choices[0].message.reasoning_content
        stream = client.chat.completions.create(**ask, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == "68"
        tool = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
        called = client.chat.completions.create(
            model="nano",
            messages=[{"role": "user", "content": "What is 37*48?"}],
            tools=[{"type": "function", "function": {"name": "calculator", "parameters": tool}}],
        )
        call = called.choices[0].message.tool_calls[0].function
        assert (call.name, call.arguments) == ("calculator", '{"expression": "37*48"}')
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(**ask, temperature=3)
        metrics = client.get("/../metrics", cast_to=str)
        assert "num_compilations_total 0.0" in metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model no-such", "no-such is not a folder, a preset"),
        ("--temperature 9", "default temperature is 9.0"),
        ("--memory 0.0001", "pool of 107008 bytes cannot serve"),
        ("--max-running 0", "max_running is 0"),
        ("--host 203.0.113.1", "cannot listen on 203.0.113.1"),
    ],
)
def test_bad_flags_get_one_sentence(capsys, flags, message):
    assert main(["--port", "0", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("k3jax-serve: ") and message in err and err.count("\n") == 1
