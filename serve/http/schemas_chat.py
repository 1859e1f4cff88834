"""The chat request and its answer."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from serve.http.schemas import MAX_TOP, Effort, OpenAIFields, Strict, Usage

TOOL_NAME = r"^[A-Za-z_][A-Za-z0-9_-]{0,255}$"


class Kept(Strict):
    """Objects that reach the prompt: fields that are not named here are kept."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class FunctionSpec(Kept):
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Kept):
    type: Literal["function"]
    function: FunctionSpec


class CalledFunction(Kept):
    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] | None = None


class CallMade(Kept):
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Part(Kept):
    type: str
    text: str | None = None


class ChatMessage(Kept):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallMade] | None = None
    tool_call_id: str | None = None
    tools: list[Tool] | None = Field(default=None, description="of a system message: tools from here on")


class JsonSchemaFormat(Kept):
    name: Annotated[str, Field(min_length=1)]
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class FunctionName(Strict):
    name: str


class NamedChoice(Strict):
    type: Literal["function"]
    function: FunctionName


class Thinking(Strict):
    type: Literal["enabled", "disabled"] | None = None
    keep: Literal["all"] | None = None
    effort: Effort | None = None


class TemplateKwargs(Strict):
    thinking: bool | None = Field(default=None, validation_alias=AliasChoices("thinking", "enable_thinking"))
    preserve_thinking: bool | None = None
    thinking_effort: Effort | None = None


class PromptFields(Strict):
    """What a chat's prompt is made of."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    thinking: Thinking | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None,
        description="other efforts than low, high and max mean the default one, none switches thinking off",
    )
    chat_template_kwargs: TemplateKwargs | None = None


class ChatRequest(OpenAIFields, PromptFields):
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None


class TextToTokenize(Strict):
    model: str | None = None
    prompt: str


class ChatToTokenize(PromptFields):
    model: str | None = None


class CallFunction(BaseModel):
    name: str
    arguments: str


class Call(BaseModel):
    id: str
    type: Literal["function"]
    function: CallFunction


class Answer(BaseModel):
    role: Literal["assistant"]
    content: str
    reasoning_content: str | None
    tool_calls: list[Call] | None = None


class ChatChoice(BaseModel):
    index: int
    message: Answer
    logprobs: dict[str, Any] | None
    finish_reason: str
    matched_stop: str | int | None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
