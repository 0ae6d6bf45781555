"""The prompts of one `generate`, from `--prompt` and from a JSONL file; all are read before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvscope_engine.cli.sampling_options import overridden
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import ChatMessage, Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams


def read_prompts(texts: Sequence[str], file: Path | None, sampling: SamplingParams, *, raw: bool) -> list[Submit]:
    """One submission a prompt, in the order given: `texts`, then the lines of `file`.

    Raises BadInput when there is none, and for the first line that cannot be read, with its number.
    """
    submits = [_from_text(text, sampling, raw=raw) for text in texts]
    if file is not None:
        submits += _from_file(file, sampling, raw=raw)
    if not submits:
        raise BadInput("no prompt is given: --prompt TEXT or --prompts FILE.jsonl")
    return [msgspec.structs.replace(submit, request_id=f"prompt-{i}") for i, submit in enumerate(submits)]


def _from_text(text: str, sampling: SamplingParams, *, raw: bool) -> Submit:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"prompt {text!r:.60} is not accepted: it is not valid UTF-8") from None
    return Submit(request_id="-", prompt=text, raw=raw, sampling=sampling)


def _from_file(path: Path, sampling: SamplingParams, *, raw: bool) -> Iterator[Submit]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise BadInput(f"prompts file {str(path)!r} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _from_line(line, sampling, raw=raw)
        except (BadInput, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadInput(f"{path}, line {number}: {error}") from None


def _from_line(line: bytes, sampling: SamplingParams, *, raw: bool) -> Submit:
    options = msgspec.json.decode(line, type=dict[str, Any])
    prompt, messages = options.pop("prompt", None), options.pop("messages", None)
    raw = options.pop("raw", raw)
    if (prompt is None) == (messages is None):
        raise BadInput('exactly one of "prompt" and "messages" is accepted')
    return Submit(
        request_id="-",
        prompt=msgspec.convert(prompt, str | None),
        messages=msgspec.convert(messages, tuple[ChatMessage, ...] | None),
        raw=msgspec.convert(raw, bool),
        sampling=overridden(sampling, options),
    )
