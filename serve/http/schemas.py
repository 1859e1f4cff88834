"""Fields that requests share, and the requests that are not chat; ranges as in spec serving 9."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

INT64 = 2**63
MAX_CHOICES = 128  # sequences of one request
MAX_TOP = 20  # alternatives per token

TokenId = Annotated[int, Field(ge=0, description="checked against the vocabulary")]
Effort = Literal["low", "high", "max"]


class Strict(BaseModel):
    """JSON types as they are, never converted; unknown fields are ignored, as OpenAI's clients send many."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)


class SamplingFields(Strict):
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="-1 or 0 keeps all")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    stop: str | Annotated[list[str], Field(max_length=32)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=32)] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    regex: str | None = Field(default=None, description="a regular expression for the whole answer")
    grammar: str | None = Field(
        default=None,
        validation_alias=AliasChoices("grammar", "ebnf"),
        description="a Lark or GBNF grammar for the answer",
    )


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIFields(SamplingFields):
    """What chat and completions share beyond sampling."""

    model: str | None = Field(default=None, description="the served model, `model:adapter`, or an adapter")
    lora_path: str | None = Field(default=None, description="name of a loaded adapter")
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None


class CompletionRequest(OpenAIFields):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    best_of: int | None = None
    suffix: str | None = None


class GenerateParams(SamplingFields):
    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    sampling_seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    skip_special_tokens: bool = True
    json_schema: str | None = Field(default=None, description="a JSON schema, as text, for the answer")


class GenerateRequest(Strict):
    text: str | list[str] | None = None
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    sampling_params: GenerateParams = Field(default_factory=GenerateParams)
    return_logprob: bool = False
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    stream: bool = False
    rid: str | None = None
    lora_path: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0


class DetokenizeRequest(Strict):
    tokens: list[TokenId]
    skip_special_tokens: bool = False


class LoadAdapterRequest(Strict):
    lora_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    lora_path: Annotated[str, Field(min_length=1)]


class UnloadAdapterRequest(Strict):
    lora_name: str


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(ErrorFields):
    """OpenAI's error object, and its fields flat."""

    error: ErrorFields
    object: Literal["error"]


class AdapterReply(BaseModel):
    success: bool
    error_message: str
    loaded_adapters: dict[str, str]


class Tokenized(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(BaseModel):
    text: str


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]
    reasoning_tokens: int


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    matched_stop: str | int | None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Generated(BaseModel):
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
