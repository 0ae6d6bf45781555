"""What a form costs the engine's thread a step: by a process of its own, and by a matcher in the engine itself.

`python scripts/bench_forms.py` takes both in turn, step by step, for batches of several sizes of the default model,
and prints medians and 99th percentiles of microseconds a step. Between accepting tokens and asking for the masks
`--between` microseconds go by, in which an engine commits and schedules.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np

from kvscope_engine.http.text import tokenizer_folder
from kvscope_engine.model.structured.compiling import compile_form
from kvscope_engine.model.structured.forms import Forms
from kvscope_engine.model.structured.vocabulary import tokenizer_info, vocabulary_of
from kvscope_engine.model.text.tokenizer import Tokenizer
from kvscope_engine.model.text.tokenizer_files import load_tokenizer
from kvscope_telemetry.messages.structured import Structured
from kvscope_telemetry.messages.telemetry import ModelInfo

NUM_LOGITS = 49_152
EOS = 2
NUM_STEPS = 300
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer"}},
        "required": ["name", "kind", "age"],
    },
}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--between", type=float, default=500.0, metavar="US")
    args = parser.parse_args()
    folders = [tokenizer_folder(ModelInfo(name="default", dtype=dtype)) for dtype in ("bfloat16", "float32")]
    tokenizer = next((tokenizer for tokenizer in map(load_tokenizer, folders) if tokenizer is not None), None)
    if tokenizer is None:
        parser.exit(1, "the default model is not on this machine: kvscope-engine generate --prompt Hi fetches it\n")
    asked = Structured(kind="json_schema", text=json.dumps(SCHEMA))
    text = json.dumps([{"name": "Tom the first", "kind": "cat", "age": 12}] * 40)
    tokens = tokenizer.encode(text, add_special_tokens=False)[:NUM_STEPS]
    with closing(Forms(tokenizer, NUM_LOGITS, {EOS})) as forms:
        print("requests  in the engine p50 / p99   by a process p50 / p99 (us a step)")
        for count in (1, 8, 32):
            inside, beside = measure(count, tokens, forms, tokenizer, asked, args.between / 1e6)
            shown = [f"{np.percentile(a, 50):9.0f} / {np.percentile(a, 99):6.0f}" for a in (inside, beside)]
            print(f"{count:8}  {shown[0]}   {shown[1]}")


def measure(
    count: int, tokens: list[int], forms: Forms, tokenizer: Tokenizer, asked: Structured, between_s: float
) -> tuple[list[float], list[float]]:
    """Microseconds of each step, of either way."""
    import xgrammar

    compiler = xgrammar.GrammarCompiler(tokenizer_info(vocabulary_of(tokenizer, NUM_LOGITS, (EOS,))), max_threads=1)
    compiled = compile_form(compiler, asked)
    own: list[Any] = [xgrammar.GrammarMatcher(compiled) for _ in range(count)]
    form = forms.get(asked)
    theirs = [form.matcher() for _ in range(count)]
    words = np.zeros((count, NUM_LOGITS // 32), np.int32)

    def inside(token: int) -> None:
        for matcher in own:
            matcher.accept_token(token)

    def inside_fill() -> None:
        for row, matcher in enumerate(own):
            matcher.fill_next_token_bitmask(words, row)

    def beside(token: int) -> None:
        for matcher in theirs:
            matcher.accept(token)
        forms.send()

    def beside_fill() -> None:
        forms.await_masks(is_idle=False)
        for row, matcher in enumerate(theirs):
            matcher.fill(words, row, may_end=True)

    beside_fill()
    found: tuple[list[float], list[float]] = ([], [])
    for token in tokens:
        found[0].append(_timed(lambda token=token: inside(token), inside_fill, between_s))  # type: ignore[misc]
        found[1].append(_timed(lambda token=token: beside(token), beside_fill, between_s))  # type: ignore[misc]
    return found


def _timed(accept: Callable[[], None], fill: Callable[[], None], between_s: float) -> float:
    began_s = time.perf_counter()
    accept()
    accepted_s = time.perf_counter()
    while time.perf_counter() - accepted_s < between_s:
        pass
    asked_s = time.perf_counter()
    fill()
    return 1e6 * (time.perf_counter() - asked_s + accepted_s - began_s)


if __name__ == "__main__":
    main()
