"""A contender of `bench neighbour`, in a process of its own, as programs that share a machine are.

Loads and says so; then decodes for as many seconds as each line of its input says, and prints how many tokens that
were in how many seconds. Ends with its input.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

PROMPT_TOKENS: Final = 32
MAX_TOKENS: Final = 900
"""Decoded at most; a fast machine stops there, before the context gets long. Less where the model's context is."""

Decode = Callable[[float], list[float]]
"""Seconds to run for, to the times at which each step's tokens were there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve measurements until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=("kvscope", "transformers"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--model", default="default")
    args = parser.parse_args(arguments)
    make = _ours if args.contender == "kvscope" else _transformers
    decode = make(args)
    decode(0.0)
    _say(threads=_num_threads())
    for line in sys.stdin:
        times = decode(float(line))
        num_tokens = args.requests * (len(times) - 1)
        _say(tokens=num_tokens, seconds=times[-1] - times[0], threads=_num_threads())
    return 0


def _ours(args: argparse.Namespace) -> Decode:
    from kvscope_engine import Engine, EngineConfig, SamplingParams
    from kvscope_telemetry.messages.commands import Submit

    options: dict[str, Any] = {"model": args.model, "dtype": args.dtype, "num_threads": args.threads}
    engine = Engine(EngineConfig(device="cpu", enable_prefix_caching=False, **options))
    max_tokens = min(MAX_TOKENS, engine.hello.model.max_model_len - PROMPT_TOKENS)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)

    def decode(seconds: float) -> list[float]:
        names = [str(number) for number in range(args.requests)]
        for number, name in enumerate(names):
            engine.submit(Submit(request_id=name, prompt_token_ids=_prompt(number), sampling=sampling))
        engine.step()
        times = [time.perf_counter()]
        while engine.has_unfinished and (len(times) < 2 or times[-1] - times[0] < seconds):
            engine.step()
            times.append(time.perf_counter())
        for name in names:
            engine.abort(name)
        while engine.has_unfinished:
            engine.step()
        return times

    return decode


def _transformers(args: argparse.Namespace) -> Decode:
    import torch
    from transformers import StoppingCriteria

    from kvscope_engine.bench.contenders.transformers_generate import plain_default_model
    from kvscope_engine.model.loading.device import choose_dtype

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    module = plain_default_model(choose_dtype(args.dtype, torch.device("cpu")))
    ids = torch.tensor([_prompt(number) for number in range(args.requests)])

    class Clock(StoppingCriteria):
        def __init__(self, seconds: float) -> None:
            self.seconds, self.times = seconds, list[float]()

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            self.times.append(time.perf_counter())
            is_over = len(self.times) > 1 and self.times[-1] - self.times[0] >= self.seconds
            return torch.full((len(input_ids),), is_over)

    def decode(seconds: float) -> list[float]:
        clock = Clock(seconds)
        with torch.inference_mode():
            module.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                min_new_tokens=MAX_TOKENS,
                pad_token_id=0,
                stopping_criteria=[clock],
            )
        return clock.times

    return decode


def _prompt(number: int) -> tuple[int, ...]:
    return tuple(3 + (37 * number + 7 * place) % 250 for place in range(PROMPT_TOKENS))


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


def _say(**facts: float) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.exit(main())
