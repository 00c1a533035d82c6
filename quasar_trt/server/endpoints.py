"""What clients ask for: completions, in two ways, and tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from quasar_trt.server.backend import Backend
from quasar_trt.server.exchange import Exchange, scored
from quasar_trt.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from quasar_trt.server.shapes import ChatShape, CompletionShape, Echo

router = APIRouter()


def backend_of(request: Request) -> Backend:
    return request.app.state.backend


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several."""
    backend = backend_of(request)
    backend.check_model(body.model)
    params = body.sampling_params(**backend.sampling)
    backend.check_count(len(body.prompts) * params.n)  # before its prompts cost anything
    prompts = [await backend.text.encode(each) if isinstance(each, str) else each for each in body.prompts]
    for prompt in prompts:
        backend.check_ids("prompt", prompt)
    echoes = None
    if body.echo:
        texts = [each if isinstance(each, str) else await backend.text.decode(each) for each in body.prompts]
        if params.logprobs is not None:
            params = scored(params)
            echoes = [Echo(text, await backend.text.token_texts(ids)) for text, ids in zip(texts, prompts, strict=True)]
        else:
            echoes = [Echo(text, []) for text in texts]
    return await Exchange(backend, body, params, CompletionShape(body, prompts, echoes)).response()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation; an answer may be as long as the context holds."""
    backend = backend_of(request)
    backend.check_model(body.model)
    params = body.sampling_params(**{"max_tokens": None} | backend.sampling)
    backend.check_count(params.n)
    ids = await backend.text.encode_chat([message.as_dict() for message in body.messages], **body.template_options())
    return await Exchange(backend, body, params, ChatShape(body, [ids])).response()


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, object]:
    """Ids of a text or a conversation, as a prompt would have them."""
    backend = backend_of(request)
    backend.check_model(body.model)
    if body.messages is None:
        ids = await backend.text.encode(body.prompt)
    else:
        ids = await backend.text.encode_chat([message.as_dict() for message in body.messages])
    return {"tokens": ids, "count": len(ids), "max_model_len": backend.max_seq_len}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    """Text of ids, special tokens included."""
    backend = backend_of(request)
    backend.check_model(body.model)
    backend.check_ids("tokens", body.tokens)
    return {"prompt": await backend.text.decode(body.tokens)}
