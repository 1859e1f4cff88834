"""/tokenize and /detokenize, also under /v1."""

from fastapi import APIRouter, Request

from serve.http.format import service_of
from serve.http.params import check_ids
from serve.http.prompt import chat_prompt
from serve.http.schemas import Detokenized, DetokenizeRequest, Tokenized
from serve.http.schemas_chat import ChatToTokenize, TextToTokenize

router = APIRouter(tags=["Engine"])


@router.post("/v1/tokenize", include_in_schema=False)
@router.post("/tokenize", response_model=Tokenized)
async def tokenize(request: Request, body: TextToTokenize | ChatToTokenize) -> Tokenized:
    """Token ids of a text, or of the whole prompt of a conversation."""
    service = service_of(request)
    service.adapter_of(body.model, None)
    size = int(request.headers.get("content-length", 0))
    if isinstance(body, TextToTokenize):
        ids = await service.offload(size, lambda: service.tokenizer.encode(body.prompt))
    else:
        prompt = await service.offload(size, lambda: chat_prompt(body, service.tokenizer, service.options))
        ids = list(prompt.ids)
    return Tokenized(tokens=ids, count=len(ids), max_model_len=service.limits.longest)


@router.post("/v1/detokenize", include_in_schema=False)
@router.post("/detokenize", response_model=Detokenized)
async def detokenize(request: Request, body: DetokenizeRequest) -> Detokenized:
    """Text of token ids; invalid UTF-8 becomes U+FFFD."""
    tokenizer = service_of(request).tokenizer
    check_ids("tokens", body.tokens, tokenizer.vocab_size)
    return Detokenized(text=tokenizer.decode(body.tokens, body.skip_special_tokens))
