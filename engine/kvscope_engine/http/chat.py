"""`POST /v1/chat/completions`: a conversation through the model's template, with tools, whole or streamed."""

from __future__ import annotations

import secrets
import time

from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from kvscope_engine.http.api import Api
from kvscope_engine.http.event_stream import Events, TextEvents, encoded, unless_gone
from kvscope_engine.http.generation import Generation, News
from kvscope_engine.http.middleware import asker_of, read_body, slot_of
from kvscope_engine.http.pages import generated_response
from kvscope_engine.http.prompts import Prompt, chat_prompt
from kvscope_engine.http.shapes.answers import (
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from kvscope_engine.http.shapes.bodies import ChatBody
from kvscope_engine.http.shapes.logprobs import chat_logprobs
from kvscope_engine.http.shapes.mapping import StreamUsage, chat_sampling, submission, wants_usage
from kvscope_engine.http.tools.use import ToolUse, check_tool_choice, tool_use
from kvscope_engine.model.text.tokenizer import Tokenizer
from kvscope_telemetry.messages.commands import Finished, Tokens
from kvscope_telemetry.messages.sampling_params import SamplingParams


async def chat(request: Request) -> Response:
    """The endpoint."""
    answer, usage = await _asked(request)
    return await generated_response(request, answer, usage)


async def _asked(request: Request) -> tuple[_Answer, StreamUsage]:
    """The answer to be, and which events of a stream tell its usage. The body is not kept."""
    api: Api = request.app.state.api
    body = await read_body(request, ChatBody, api.settings.limits)
    api.check_model(body.model)
    check_tool_choice(body)
    usage, sampling = wants_usage(body), chat_sampling(body)
    slot, asker = slot_of(request), asker_of(request)
    slot.choose(sampling.n)
    tokenizer = await api.text.tokenizer(api.hello.model)
    use = tool_use(body, tokenizer, api.settings.tool_call_parser)
    sampling = use.sampling(sampling)
    prompt = await unless_gone(request, chat_prompt(api, asker, tokenizer, body, slot.body_bytes))
    slot.give_body()
    return _Answer(api, slot.client, body, sampling, prompt, tokenizer, use), usage


class _Answer:
    """To one body."""

    def __init__(
        self,
        api: Api,
        client: str,
        body: ChatBody,
        sampling: SamplingParams,
        prompt: Prompt,
        tokenizer: Tokenizer | None,
        use: ToolUse,
    ) -> None:
        self._id = f"chatcmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._model = api.model_name
        self._tokenizer = tokenizer
        self._readers = [use.reader() for _ in range(sampling.n)]
        self._texts = [use.marked_text(tokenizer) for _ in range(sampling.n)]
        self._num_choices = sampling.n
        whose = {"client": client, "batch": self._id}
        submit = submission(self._id, body, sampling, raw=False, **whose, **prompt.fields)
        self.is_stream = bool(body.stream)
        self.generation = Generation(api.line, [submit], is_stream=self.is_stream)

    async def whole(self) -> ChatCompletion:
        """All of it."""
        with self.generation as generation:
            await generation.begin()
            news = await generation.rest()
            said = [[piece for number, piece in news if number == index] for index in range(self._num_choices)]
            choices = [self._choice(index, pieces) for index, pieces in enumerate(said)]
            usage = generation.usage
        return ChatCompletion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    async def events(self, usage: StreamUsage) -> Events:
        """What was said, as it is said. Everything was taken in before."""
        begin = ChatDelta(role="assistant", content="")

        def chunk(choice: ChatChunkChoice) -> ChatChunk:
            if usage is StreamUsage.EACH:
                return self._chunk([choice], self.generation.usage_so_far)
            return self._chunk([choice], UNSET if usage is StreamUsage.NONE else None)

        texts = TextEvents(lambda number, text: chunk(ChatChunkChoice(number, ChatDelta(content=text))))
        with self.generation as generation:
            yield encoded(chunk(ChatChunkChoice(n, begin)) for n in range(self._num_choices))
            while news := await generation.next():
                yield b"".join(
                    encoded([chunk(choice)])
                    if (text := _text_alone(choice)) is None or usage is StreamUsage.EACH
                    else texts.event(choice.index, text)
                    for choice in self._deltas(news)
                )
            if usage is not StreamUsage.NONE:
                yield encoded([self._chunk([], generation.usage)])

    def _choice(self, index: int, pieces: list[Tokens | Finished]) -> ChatChoice:
        said = [piece for piece in pieces if isinstance(piece, Tokens)]
        content, calls = self._read(index, pieces)
        logprobs = [entry for piece in said if (one := chat_logprobs(piece, self._tokenizer)) for entry in one.content]
        message = ChatMessage(content=None if calls and not content.strip() else content)
        if calls:
            message = replace(message, tool_calls=[replace(call, index=UNSET) for call in calls])
        return ChatChoice(index, message, ChatLogprobs(logprobs) if logprobs else None, self._reason(index, pieces[-1]))

    def _deltas(self, news: News) -> list[ChatChunkChoice]:
        choices = []
        for index, said in news:
            content, calls = self._read(index, [said])
            logprobs = chat_logprobs(said, self._tokenizer) if isinstance(said, Tokens) else None
            if content or calls or logprobs is not None:
                delta = ChatDelta(content=content or UNSET, tool_calls=calls or UNSET)
                choices.append(ChatChunkChoice(index, delta, logprobs))
            if isinstance(said, Finished):
                choices.append(ChatChunkChoice(index, ChatDelta(), None, self._reason(index, said)))
        return choices

    def _read(self, index: int, pieces: list[Tokens | Finished]) -> tuple[str, list[CalledTool]]:
        """Text that can be told, and calls."""
        reader, marked = self._readers[index], self._texts[index]
        if marked is not None:
            text = "".join(map(marked.add, pieces))
        else:
            text = "".join(piece.text for piece in pieces if isinstance(piece, Tokens))
        if reader is None:
            return text, []
        content, calls = reader.add(text)
        if isinstance(pieces[-1], Finished):
            rest, more = reader.flush()
            content, calls = content + rest, calls + more
        return content, calls

    def _reason(self, index: int, last: Tokens | Finished) -> str | None:
        reason = last.finish_reason if isinstance(last, Finished) else None
        reader = self._readers[index]
        return "tool_calls" if reason == "stop" and reader is not None and reader.num_calls else reason

    def _chunk(self, choices: list[ChatChunkChoice], usage: object) -> ChatChunk:
        chunk = ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices)
        return chunk if usage is UNSET else replace(chunk, usage=usage)


def _text_alone(choice: ChatChunkChoice) -> str | None:
    """What is new of an answer where that is text and nothing else."""
    is_plain = choice.finish_reason is None and choice.logprobs is None and choice.delta.tool_calls is UNSET
    return choice.delta.content if is_plain and isinstance(choice.delta.content, str) else None
