"""`POST /v1/completions`: prompts as they are, text or token ids, whole or streamed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvscope_engine.http.api import Api
from kvscope_engine.http.event_stream import Events, TextEvents, encoded, unless_gone
from kvscope_engine.http.generation import Generation, News
from kvscope_engine.http.middleware import asker_of, read_body, slot_of
from kvscope_engine.http.pages import generated_response
from kvscope_engine.http.prompts import Prompt, text_prompts
from kvscope_engine.http.shapes.answers import Completion, CompletionChoice, CompletionLogprobs, UsageInfo
from kvscope_engine.http.shapes.bodies import MAX_PROMPTS, CompletionBody
from kvscope_engine.http.shapes.errors import ApiError
from kvscope_engine.http.shapes.logprobs import completion_logprobs, joined
from kvscope_engine.http.shapes.mapping import StreamUsage, completion_sampling, submission, wants_usage
from kvscope_engine.model.text.tokenizer import Tokenizer
from kvscope_telemetry.messages.commands import Finished
from kvscope_telemetry.messages.sampling_params import SamplingParams


async def completions(request: Request) -> Response:
    """The endpoint."""
    answer, usage = await _asked(request)
    return await generated_response(request, answer, usage)


async def _asked(request: Request) -> tuple[_Answer, StreamUsage]:
    """The answer to be, and which events of a stream tell its usage. The body is not kept."""
    api: Api = request.app.state.api
    body = await read_body(request, CompletionBody, api.settings.limits)
    api.check_model(body.model)
    usage, sampling = wants_usage(body), completion_sampling(body)
    slot, given = slot_of(request), _given(body)
    slot.choose(len(given) * sampling.n)
    tokenizer = await api.text.tokenizer(api.hello.model)
    prompts = await unless_gone(request, text_prompts(api, asker_of(request), tokenizer, given))
    slot.give_body()
    return _Answer(api, slot.client, body, sampling, prompts, tokenizer), usage


def _given(body: CompletionBody) -> Sequence[str | list[int]]:
    """Prompts of all the forms in which they may come. Raises ApiError."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(token, int) for token in given):
        return [[token for token in given if isinstance(token, int)]]
    prompts = [prompt for prompt in given if isinstance(prompt, str | list)]
    if not prompts or len(prompts) != len(given) or len({type(prompt) for prompt in prompts}) > 1:
        message = "prompt is not accepted: a string, token ids, or a list of one of them"
        raise ApiError(400, message, param="prompt")
    if len(prompts) > MAX_PROMPTS:
        message = f"{len(prompts)} prompts are not accepted: at most {MAX_PROMPTS} in a request"
        raise ApiError(400, message, param="prompt")
    return prompts


class _Answer:
    """To one body."""

    def __init__(
        self,
        api: Api,
        client: str,
        body: CompletionBody,
        sampling: SamplingParams,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer | None,
    ) -> None:
        self._id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._model = api.model_name
        self._tokenizer = tokenizer
        self._lengths: dict[int, int] = {}
        submits = [
            submission(f"{self._id}-{number}", body, sampling, raw=True, client=client, batch=self._id, **prompt.fields)
            for number, prompt in enumerate(prompts)
        ]
        self._num_choices = len(prompts) * sampling.n
        self.is_stream = bool(body.stream)
        self.generation = Generation(api.line, submits, is_stream=self.is_stream)

    async def whole(self) -> Completion:
        """All of it."""
        with self.generation as generation:
            await generation.begin()
            choices = self._choices(await generation.rest())
            parts: dict[int, list[CompletionChoice]] = {number: [] for number in range(self._num_choices)}
            for choice in choices:
                parts[choice.index].append(choice)
            return self._completion([_whole(number, part) for number, part in parts.items()], generation.usage)

    async def events(self, usage: StreamUsage) -> Events:
        """What was said, as it is said. Everything was taken in before."""

        def chunk(choice: CompletionChoice) -> Completion:
            if usage is StreamUsage.EACH:
                return self._completion([choice], self.generation.usage_so_far)
            return self._completion([choice], UNSET if usage is StreamUsage.NONE else None)

        texts = TextEvents(lambda number, text: chunk(CompletionChoice(number, text)))
        with self.generation as generation:
            while news := await generation.next():
                yield b"".join(
                    encoded([chunk(choice)])
                    if choice.finish_reason or choice.logprobs or usage is StreamUsage.EACH
                    else texts.event(choice.index, choice.text)
                    for choice in self._choices(news)
                )
            if usage is not StreamUsage.NONE:
                yield encoded([self._completion([], generation.usage)])

    def _choices(self, news: News) -> list[CompletionChoice]:
        choices = []
        for number, said in news:
            if isinstance(said, Finished):
                choices.append(CompletionChoice(number, "", None, said.finish_reason))
                continue
            offset = self._lengths.get(number, 0)
            self._lengths[number] = offset + len(said.text)
            logprobs = completion_logprobs(said, self._tokenizer, offset)
            if said.text or logprobs is not None:
                choices.append(CompletionChoice(number, said.text, logprobs))
        return choices

    def _completion(self, choices: list[CompletionChoice], usage: UsageInfo | UnsetType | None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)


def _whole(number: int, parts: Sequence[CompletionChoice]) -> CompletionChoice:
    logprobs: list[CompletionLogprobs] = [part.logprobs for part in parts if part.logprobs is not None]
    text = "".join(part.text for part in parts)
    return CompletionChoice(number, text, joined(logprobs), parts[-1].finish_reason)
