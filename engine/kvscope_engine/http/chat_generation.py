"""Generates the answers to one conversation, and separates reasoning, content and tool calls in them.

Shared by the endpoints of chat completions and responses, which differ only in the form of bodies and answers.
"""

from __future__ import annotations

from starlette.requests import Request

from kvscope_engine.http.api_state import Api
from kvscope_engine.http.generation import Generation
from kvscope_engine.http.http_connection import cancel_on_disconnect
from kvscope_engine.http.middleware import owner_of, slot_of
from kvscope_engine.http.prompt_echo import PromptScores
from kvscope_engine.http.request_prompts import Prompt, chat_prompt
from kvscope_engine.http.schemas.request_bodies import ChatBody
from kvscope_engine.http.schemas.sampling_mapping import chat_sampling, submission
from kvscope_engine.http.tool_calling.answer_format import AnswerFormat, answer_format, check_tool_choice
from kvscope_engine.http.tool_calling.answer_reader import AnswerPart
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.messages.commands import Finished, Tokens
from kvscope_telemetry.messages.sampling_params import SamplingParams


class ChatGeneration:
    """One chat at the engine. `generation` submits and ends it; `read` converts the engine's replies to parts
    of the answers.
    """

    def __init__(
        self,
        api: Api,
        client: str,
        request_id: str,
        body: ChatBody,
        sampling: SamplingParams,
        prompt: Prompt,
        tokenizer: Tokenizer | None,
        answers: AnswerFormat,
        adapter: str,
    ) -> None:
        self.model = adapter or api.model_name
        self.tokenizer = tokenizer
        self.num_choices = sampling.n
        self.num_reasoning_tokens = 0
        """Number of reasoning tokens over all choices. The tokens of an engine reply count as reasoning if the
        reply ends within the reasoning.
        """
        self.scores = PromptScores(tokenizer, are_returned=body.prompt_logprobs is not None)
        self._includes_reasoning = body.include_reasoning is not False
        prompt_ids = prompt.fields.get("prompt_token_ids", ())
        self._readers = [answers.reader(tokenizer, prompt_ids) for _ in range(sampling.n)]
        self._texts = [answers.marked_text(tokenizer) for _ in range(sampling.n)]
        owner = {"client": client, "batch": request_id, "adapter": adapter}
        submit = submission(request_id, body, sampling, raw=False, **owner, **prompt.fields)
        self.generation = Generation(api.engine_client, [submit], is_stream=bool(body.stream))

    def read(self, index: int, reply: Tokens | Finished) -> AnswerPart:
        """Read the next reply to choice `index`: text that can be shown, and calls that are complete."""
        if isinstance(reply, Tokens) and reply.prompt_logprobs:
            self.scores.add(reply)
        reader, marked = self._readers[index], self._texts[index]
        text = reply.text if isinstance(reply, Tokens) else ""
        if marked is not None:
            text = marked.add(reply)
        if reader is None:
            return AnswerPart("", text, [])
        part = reader.read(text, is_last=isinstance(reply, Finished))
        if reader.is_reasoning and isinstance(reply, Tokens):
            self.num_reasoning_tokens += len(reply.token_ids)
        return part if self._includes_reasoning else part._replace(reasoning="")

    def finish_reason(self, index: int, last: Tokens | Finished) -> str | None:
        """Return why choice `index` ended, in OpenAI's terms; None if `last` is not its last reply."""
        reason = last.finish_reason if isinstance(last, Finished) else None
        reader = self._readers[index]
        return "tool_calls" if reason == "stop" and reader is not None and reader.num_calls else reason


async def chat_generation(request: Request, body: ChatBody, request_id: str) -> ChatGeneration:
    """Check `body`, tokenize its conversation, and return the generation, which is not submitted yet. Raises ApiError.

    The request's body must have been read with `read_body`; its memory is released.
    """
    api: Api = request.app.state.api
    adapter = await api.adapter_of(body.model)
    check_tool_choice(body)
    sampling = chat_sampling(body)
    slot, owner = slot_of(request), owner_of(request)
    slot.count_choices(sampling.n)
    tokenizer = await api.tokenizer_threads.tokenizer(api.hello.model)
    parser, is_structured = api.settings.tool_call_parser, sampling.structured is not None
    answers = answer_format(body, tokenizer, parser, is_structured=is_structured)
    sampling = answers.sampling(sampling)
    prompt = await cancel_on_disconnect(request, chat_prompt(api, owner, tokenizer, body, slot.body_bytes))
    slot.release_body()
    return ChatGeneration(api, slot.client, request_id, body, sampling, prompt, tokenizer, answers, adapter)
