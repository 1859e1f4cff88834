// A conversation: streamed answers with their thinking and tool calls, whose results the user types in.

const $ = (id) => document.getElementById(id);

export function startChat(ask) {
  let messages = [];
  let running = null; // AbortController of the answer being written

  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("input").value.trim();
    if (!text || running) return;
    $("input").value = "";
    messages.push({ role: "user", content: text });
    show("message user", text);
    answer();
  });
  $("input").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("form").requestSubmit();
    }
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    $("log").replaceChildren();
  });

  function request() {
    const system = $("system").value.trim();
    const tools = $("tools").value.trim();
    const effort = $("effort").value;
    const body = {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
      thinking: effort === "off" ? { type: "disabled" } : { type: "enabled", effort },
      stream: true,
    };
    if (tools) body.tools = JSON.parse(tools);
    if ($("temperature").value) body.temperature = Number($("temperature").value);
    if ($("limit").value) body.max_completion_tokens = Number($("limit").value);
    return body;
  }

  async function answer() {
    const conversation = messages;
    const view = new View(show("message assistant", ""));
    running = new AbortController();
    setRunning(true);
    try {
      const response = await ask("v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(request()),
        signal: running.signal,
      });
      for await (const chunk of events(response.body)) {
        if (chunk.error) throw new Error(chunk.error.message);
        view.add(chunk);
        scroll();
      }
    } catch (error) {
      view.fail(error.name === "AbortError" ? "stopped" : error.message);
    }
    running = null;
    setRunning(false);
    if (conversation !== messages) return; // a new chat began meanwhile
    const message = view.message();
    if (!view.failed || message.content) conversation.push(message);
    if (view.failed) delete message.tool_calls;
    askResults(view, message.tool_calls ?? [], conversation);
  }

  /** An input under every call; the last result sends all of them. */
  function askResults(view, calls, conversation) {
    const results = new Map();
    for (const [i, call] of calls.entries()) {
      view.askResult(i, (text) => {
        results.set(call.id, text);
        if (results.size < calls.length || conversation !== messages) return;
        for (const { id } of calls) messages.push({ role: "tool", tool_call_id: id, content: results.get(id) });
        answer();
      });
    }
    scroll();
  }

  function setRunning(on) {
    $("send").disabled = on;
    $("stop").disabled = !on;
  }
}

/** The JSON objects of a stream of server-sent events, until [DONE]. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue; // a keep-alive comment
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

/** An assistant message while it is written. */
class View {
  constructor(root) {
    this.root = root;
    this.reasoning = "";
    this.content = "";
    this.calls = [];
    this.failed = false;
  }

  add(chunk) {
    const choice = chunk.choices[0];
    if (!choice) {
      const { prompt_tokens: prompt, completion_tokens: completion, prompt_tokens_details: details } = chunk.usage;
      make(this.root, "div", "note").textContent =
        `${prompt} prompt tokens (${details.cached_tokens} cached), ${completion} new`;
      return;
    }
    const { reasoning_content: reasoning, content, tool_calls: calls } = choice.delta;
    if (reasoning) {
      this.reasoning += reasoning;
      this.thinking().append(reasoning);
    }
    if (content) {
      this.content += content;
      this.answer ??= make(this.root, "div", "answer");
      this.answer.append(content);
    }
    for (const call of calls ?? []) this.addCall(call);
    if (choice.finish_reason === "length") make(this.root, "div", "note").textContent = "cut: no tokens are left";
    if (choice.finish_reason === "abort") this.fail("the server ended this answer");
  }

  thinking() {
    if (!this.thoughts) {
      const details = make(this.root, "details", "thinking");
      details.open = true;
      make(details, "summary").textContent = "Thinking";
      this.thoughts = make(details, "div", "thoughts");
    }
    return this.thoughts;
  }

  addCall({ index, id, function: { name, arguments: text } }) {
    if (!this.calls[index]) {
      const box = make(this.root, "div", "call");
      make(box, "strong").textContent = name;
      this.calls[index] = { id, name, text: "", box, code: make(box, "code") };
    }
    const call = this.calls[index];
    call.text += text ?? "";
    call.code.textContent = call.text;
  }

  askResult(index, done) {
    const input = make(this.calls[index].box, "input", "result");
    input.placeholder = "Result, Enter to send";
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || input.disabled) return;
      input.disabled = true;
      done(input.value);
    });
  }

  fail(text) {
    this.failed = true;
    make(this.root, "div", "error").textContent = text;
  }

  message() {
    const message = { role: "assistant", content: this.content, reasoning_content: this.reasoning };
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, name, text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      }));
    }
    return message;
  }
}

function make(parent, tag, className = "") {
  const element = document.createElement(tag);
  element.className = className;
  parent.append(element);
  return element;
}

function show(className, text) {
  const element = make($("log"), "div", className);
  element.textContent = text;
  scroll();
  return element;
}

function scroll() {
  $("log").scrollTop = $("log").scrollHeight;
}
