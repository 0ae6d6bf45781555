"""Try a tiny model of each type in the engine and in transformers; the outcome is a row of a table."""

from __future__ import annotations

import inspect
import random
import re
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from tests.engine.model_types import default_config, tiny_config

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_engine.completion import Completion
from kvscope_engine.model.hf_config import read_config
from kvscope_engine.model.layers.own_forward import own_forward
from kvscope_engine.model.loader.model_loader import random_model
from kvscope_engine.model.loader.supported_models import blueprint
from kvscope_engine.model.loader.text_part import loading_class, reading_config
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.request_state import RequestState

NUM_TOKENS: Final = 8
MAX_PARAMETERS: Final = 20_000_000
TOLERANCE: Final = 1e-3
NAME: Final = "x"


@dataclass(frozen=True)
class Outcome:
    """The outcome of trying a model type."""

    result: str
    """`served`, `refused`, or `not tried`."""
    words: str = ""
    """The reason it is not served."""
    architecture: str = ""
    cache: str = ""
    """What the engine caches: kinds of KV groups, and states."""
    compared_with: str = ""
    """The `whole` model without its other parts, or its `text part` if transformers does not run the former."""
    example: str = ""
    """A checkpoint that transformers names next to the configuration."""


class Differs(Exception):
    """The output of the engine differs from transformers."""


def try_type(model_type: str) -> Outcome:
    """Return the outcome; an error is an outcome, too."""
    return replace(_outcome(model_type), example=_example(model_type))


def _example(model_type: str) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    source = inspect.getsource(inspect.getmodule(kind) or kind)
    found = re.search(rf'checkpoint="([^"]+)"[^@]*?\)\n(?:@\w+\n)*class {kind.__name__}\b', source)
    return found[1] if found else ""


def _outcome(model_type: str) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="kvscope-types-"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _try_in_folder(model_type, folder)
    except KvscopeError as error:
        return Outcome("refused", _without_model_name(str(error)))
    except Differs as error:
        return Outcome("differs", str(error))
    except Exception as error:  # transformers may raise anything for a configuration
        line = " ".join(str(error).split())
        return Outcome("not tried", f"{type(error).__name__}: {line:.200}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _try_in_folder(model_type: str, folder: Path) -> Outcome:
    try:
        config = tiny_config(model_type)
    except Exception:
        blueprint(default_config(model_type), NAME)  # many are refused because of their type
        raise
    plan = blueprint(config, NAME)
    if plan.num_parameters > MAX_PARAMETERS:
        raise ValueError(f"{plan.num_parameters / 1e6:.0f} million parameters are not tiny")
    reference, name, compared = _reference(config, folder)
    options: dict[str, Any] = {"host_kv_memory_bytes": 1 << 24, "preemption": "swap"}
    small = {"block_size": 4, "num_gpu_blocks_override": 1200, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    if plan.has_states:
        small |= {"state_interval": 16, "state_checkpoints": 20}
    engine_config = EngineConfig(model=name, device="cpu", dtype="float32", max_model_len=256, **(small | options))
    with Engine(engine_config) as engine:
        cache = ", ".join(_cache_kinds(engine))
        _compare(engine, reference)
    return Outcome("served", "", plan.architecture, cache, compared)


def _cache_kinds(engine: Engine) -> list[str]:
    """Return the kinds of what the engine caches for a request."""
    layers, states = engine.components.storage.layers, engine.components.states
    groups = [group for group in engine.hello.cache.groups if group.num_layers and group.kind != "state"]
    kinds = [group.kind for group in groups] or ["full"] * bool(layers)
    is_own = own_forward(engine.components.loaded.module) is not None
    return list(dict.fromkeys(kinds + ["states"] * (states is not None) + ["own code"] * is_own))


def _reference(config: Any, folder: Path) -> tuple[Any, str, str]:
    """Return transformers' model, the engine's name for it, and which model that is."""
    torch.manual_seed(0)
    try:
        model = _saved_model(config, folder)
        return model, str(folder), "whole, by its own positions" if _counts_from_padding(model) else "whole"
    except Exception:  # a class that needs an image or a sound
        pass
    path = folder / "config.json"
    config.to_json_file(path, use_diff=False)
    model = random_model(read_config(path), torch.float32, torch.device("cpu"), 0, lambda _: None).eval()
    return model, f"dummy:{path}", "text part"


def _saved_model(config: Any, folder: Path) -> Any:
    """Save a model to `folder` and return it as transformers reads it, without the parts that add nothing to text."""
    kind, reading = loading_class(config), reading_config(config)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    kind._from_config(reading, **options).save_pretrained(folder)
    if reading is not config:
        raise ValueError("what reads is a part of the whole")
    model = kind.from_pretrained(folder, config=reading, **options).eval()
    generate(model, (5, 6, 7))
    return model


@torch.inference_mode()
def generate(model: Any, ids: Sequence[int]) -> tuple[list[int], list[list[float]]]:
    """Return greedy tokens and the log probabilities of the five most likely at each."""
    for part in model.modules():  # where RecurrentGemma keeps them from one call to the next
        if hasattr(part, "conv1d_state"):
            part.conv1d_state = None
    if _counts_from_padding(model) or not hasattr(model, "generate"):
        tokens, logits = _token_by_token(model, list(ids))
    else:
        tokens, logits = _generated(model, list(ids))
    return tokens, [each.float().log_softmax(-1).topk(5).values.tolist() for each in logits]


def _generated(model: Any, ids: list[int]) -> tuple[list[int], list[torch.Tensor]]:
    out = model.generate(
        input_ids=torch.tensor([ids]),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(ids) :].tolist(), [logits[0] for logits in out.logits]


def _counts_from_padding(model: Any) -> bool:
    """Return whether `generate` of transformers counts positions from 0 for a model that counts from its padding, like
    RoBERTa.
    """
    return any(hasattr(part, "create_position_ids_from_input_ids") for part in model.modules())


def _token_by_token(model: Any, ids: list[int]) -> tuple[list[int], list[torch.Tensor]]:
    """Generate with a class without `generate`, or whose `generate` counts positions in another way than the model."""
    tokens: list[int] = []
    logits: list[torch.Tensor] = []
    while len(tokens) < NUM_TOKENS:
        given = torch.tensor([ids + tokens])
        positions = None if _counts_from_padding(model) else torch.arange(given.shape[1])[None]
        logits.append(model(input_ids=given, position_ids=positions, use_cache=False).logits[0, -1])
        tokens.append(int(logits[-1].argmax()))
    return tokens, logits


def prompts() -> list[list[int]]:
    """Return prompts of several lengths; the last begins like the one before."""
    found = [random.Random(i).choices(range(3, 90), k=k) for i, k in enumerate((1, 7, 61))]
    return [*found, found[-1][:41] + found[1]]


def _compare(engine: Engine, model: Any) -> None:
    asked = prompts()
    wanted = [generate(model, ids) for ids in asked]
    _check("in pieces", engine, asked, wanted)
    again = _check("found in the cache", engine, asked[-1:], wanted[-1:])
    if not again[0].usage.cached_tokens:
        raise Differs("a prompt is not found in the cache")
    _check("forked", engine, asked[2:3], wanted[2:3], n=2)
    if not _check_preempted(engine, asked, wanted):
        raise Differs("nothing was preempted")
    if len({token for tokens, _ in wanted for token in tokens}) < 3:
        raise Differs("the model says nearly the same always: this compares little")


def _check(
    how: str, engine: Engine, asked: list[list[int]], wanted: list[tuple[list[int], list[list[float]]]], n: int = 1
) -> list[Completion]:
    completions = list(engine.generate([_submit(str(i), ids, n) for i, ids in enumerate(asked)]))
    for completion in completions:
        tokens, tops = wanted[completion.index]
        if completion.error:
            raise Differs(f"{how}: {completion.error}")
        for number, (found, top) in enumerate(zip(completion.logprobs, tops, strict=True)):
            far = max(abs(a - b) for (_, a), b in zip(found.top, top, strict=True))
            if far > TOLERANCE:
                raise Differs(f"{how}: a log-probability of token {number} is {far:.2g} away")
        if list(completion.token_ids) != tokens:
            raise Differs(f"{how}: {list(completion.token_ids)} and not {tokens}")
    return completions


def _submit(name: str, ids: Sequence[int], n: int = 1) -> Submit:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5, n=n)
    return Submit(request_id=name, prompt_token_ids=tuple(ids), sampling=sampling)


def _check_preempted(engine: Engine, asked: list[list[int]], wanted: list[tuple[list[int], list[list[float]]]]) -> int:
    """Swap a request out and in at each third step, and compare the tokens."""
    scheduler = engine.components.scheduler
    engine.reset_prefix_cache()
    for number, ids in enumerate(asked):
        engine.submit(_submit(str(number), ids))
    requests, count, steps = dict(scheduler.requests), 0, 0
    while engine.has_unfinished:
        engine.step(ahead=False)
        steps += 1
        running = [request for request in requests.values() if request.state is RequestState.RUNNING]
        if steps % 3 == 0 and running:
            count += scheduler.preempt(running[steps % len(running)], "swap", "a test", 0) is not None
        scheduler.check_integrity()
    for request, (tokens, _) in zip(requests.values(), wanted, strict=True):
        if request.output_token_ids != tokens:
            raise Differs(f"preempted: {request.output_token_ids} and not {tokens}")
    return count


def _without_model_name(line: str) -> str:
    """Return a refusal without the name of the model."""
    return re.sub(rf"^model (architecture \w+|{NAME!r}) is not (supported|accepted): ", "", line)
