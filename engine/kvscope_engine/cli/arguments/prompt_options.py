"""Prompts of `generate`, from `--prompt` and a JSONL file. All are read before any of them runs."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvscope_engine.cli.arguments.sampling_options import with_line_options
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

_LINE_FIELDS: Final = ("raw", "priority", "cache_salt", "adapter", "tools")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def read_prompts(
    texts: Sequence[str],
    file: Path | None,
    sampling: SamplingParams,
    *,
    raw: bool,
    priority: int = 0,
    cache_salt: str = "",
    adapter: str = "",
) -> list[Submit]:
    """Return one submission per prompt: first `texts`, then the lines of `file`, whose own options take precedence over
    `sampling`.

    Raises BadInput if there is no prompt, and for the first line that cannot be read, with its number.
    """
    options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "adapter": adapter}
    base = _validated(Submit(request_id="-", sampling=sampling, raw=raw, **options))
    submits = [_from_text(text, base) for text in texts]
    if file is not None:
        submits += _from_file(file, base)
    if not submits:
        raise BadInput("no prompt given: use --prompt TEXT or --prompts FILE.jsonl")
    return [msgspec.structs.replace(submit, request_id=f"prompt-{i}") for i, submit in enumerate(submits)]


def _validated(submit: Submit) -> Submit:
    """Apply the checks that a submission from a client would undergo when it is decoded. Raises BadInput."""
    try:
        return msgspec.convert(msgspec.to_builtins(submit, str_keys=True), Submit, str_keys=True)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise BadInput(str(error)) from None


def _from_text(text: str, base: Submit) -> Submit:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"prompt {text!r:.60} is not accepted: it is not valid UTF-8") from None
    return msgspec.structs.replace(base, prompt=text)


def _from_file(path: Path, base: Submit) -> Iterator[Submit]:
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise BadInput(f"prompts file {str(path)!r} cannot be read: {error.strerror}") from None
    if lines[0].startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise BadInput(f"prompts file {str(path)!r} is not accepted: it is UTF-16; UTF-8 is needed")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _from_line(line, base)
        except (BadInput, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadInput(f"{path}, line {number}: {_lone_surrogate(line) or error}") from None


def _lone_surrogate(line: bytes) -> str:
    """Return the error text for a line with a lone surrogate, which the decoder would report as a truncated
    line. Returns "" for other lines.
    """
    try:
        value = json.dumps(json.loads(line), ensure_ascii=False)
    except (ValueError, RecursionError):
        return ""
    half = _SURROGATE.search(value)
    return f"{half[0]!r} is half of a surrogate pair, not a character" if half else ""


def _from_line(line: bytes, base: Submit) -> Submit:
    options = msgspec.json.decode(line, type=dict[str, Any])
    prompt, messages = options.pop("prompt", None), options.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise BadInput('exactly one of "prompt" and "messages" is accepted')
    line_fields = {name: options.pop(name) for name in _LINE_FIELDS if name in options}
    if not isinstance(line_fields.get("tools", ""), str):
        line_fields["tools"] = json.dumps(line_fields["tools"])
    fields = (
        {"type": "Submit", "request_id": "-", "raw": base.raw} | {"prompt": prompt, "messages": messages} | line_fields
    )
    defaults = {"priority": base.priority, "cache_salt": base.cache_salt, "adapter": base.adapter}
    submit = msgspec.convert(defaults | fields, Submit)
    return msgspec.structs.replace(submit, sampling=with_line_options(base.sampling, options))
