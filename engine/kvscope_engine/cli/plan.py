"""Command `kvscope-engine plan`: estimates a model's GPU memory for serving and training, from its configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvscope_engine.cli.lazy_engine import quick_imports
from kvscope_engine.cli.notices import print_notice
from kvscope_engine.cli.quick_transformers import import_transformers
from kvscope_engine.command_parser import CommandParser, number, parse_int, parse_size
from kvscope_engine.planning.stored_plans import plan_identity, store_answers, stored_answers
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.memory_plan import KV_CACHE_DTYPES, WEIGHT_BYTES, PlanAnswer
from kvscope_telemetry.messages.what_if import Complaint
from kvscope_telemetry.printable import print_text

if TYPE_CHECKING:
    from kvscope_engine.planning.inference_plan import InferenceQuestion
    from kvscope_engine.planning.training_plan import TrainingQuestion

LENGTHS: Final = "1024,4096,16384"
MAX_LENGTHS: Final = 16
_NO_OPTIONS: Final = frozenset({"command", "debug", "json", "lines", "model", "run"})
"""Arguments that do not change the plan; `model` is identified by its configuration."""


def add_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="estimate a model's GPU memory",
        description="Estimate a model's GPU memory by category, and how many requests fit; with --train, also for"
        " training. Reads only the model's config and needs no GPU.",
    )
    _add_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--lines",
        action="store_true",
        help="for the desktop: read a JSON array of options per input line; answer each with two JSON lines, first "
        "serving only, then complete",
    )
    parser.set_defaults(run=run)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="default", metavar="M", help="a model, as for serve, or a config.json")
    parser.add_argument(
        "--gpu-memory", type=parse_size, metavar="SIZE", help="memory of one GPU, such as 24GiB (required)"
    )
    _add_serving(parser.add_argument_group("serving"))
    _add_training(parser.add_argument_group("training"))


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns 0 whether or not the model fits."""
    if args.lines:
        return _answer_lines()
    *_, answer = _answers(args)
    if args.json:
        print(msgspec.json.encode(answer).decode())
        return 0
    from kvscope_engine.planning.plan_report_text import plan_text

    print_text(plan_text(answer))
    return 0


def _answer_lines() -> int:
    """Read one question per input line, and print the answer to each, until the input ends.

    Each answer is printed as two lines: first only the plan for serving, then the complete answer.
    """
    parser = CommandParser(prog="kvscope-engine plan")
    _add_options(parser)
    for line in sys.stdin.buffer:
        try:
            for answer in _answers(parser.parse_args(msgspec.json.decode(line, type=list[str]))):
                _print_answer(answer)
        except msgspec.MsgspecError as error:
            _print_answer(Complaint(error=f"no JSON array of options: {error}"))
        except KvscopeError as error:
            _print_answer(Complaint(error=str(error)))
    return 0


def _print_answer(answer: PlanAnswer | Complaint) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def _answers(args: argparse.Namespace) -> Iterator[PlanAnswer]:
    """Yield first an answer with only the plan for serving, then the complete answer."""
    if args.gpu_memory is None:
        raise BadInput("--gpu-memory is missing: the memory of one GPU with its unit, as 24GiB")
    lengths = _lengths(args.lengths)
    identity = plan_identity(args.model, {name: value for name, value in vars(args).items() if name not in _NO_OPTIONS})
    answers = stored_answers(identity, print_notice)
    if answers:
        yield from answers
        return
    for answer in _new_answers(args, lengths):
        answers.append(answer)
        yield answer
    store_answers(identity, answers)


def _new_answers(args: argparse.Namespace, lengths: tuple[int, ...]) -> Iterator[PlanAnswer]:
    with quick_imports():
        import_transformers()
        question, training = _serving_question(args), _training_question(args)
        from kvscope_engine.planning.inference_plan import plan_inference
        from kvscope_engine.planning.plan_answer import build_answer
        from kvscope_engine.planning.skeleton import read_skeleton
        from kvscope_engine.planning.training_plan import plan_training

        skeleton = read_skeleton(args.model)  # imports the code of the model's architecture
        plan = plan_inference(skeleton, question)
    yield build_answer(skeleton, plan, lengths, is_first=True)
    yield build_answer(skeleton, plan, lengths, None if training is None else plan_training(skeleton, training))


def _add_serving(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dtype",
        default="bfloat16",
        metavar="T",
        help=f"data type of weights: {', '.join(WEIGHT_BYTES)}",
    )
    group.add_argument(
        "--kv-cache-dtype", default="auto", metavar="T", help=f"data type of the KV cache: {', '.join(KV_CACHE_DTYPES)}"
    )
    group.add_argument(
        "--gpu-memory-utilization", type=number, default=0.9, metavar="F", help="fraction of the GPU's memory to use"
    )
    group.add_argument("--block-size", type=parse_int, default=16, metavar="N", help="tokens per block")
    group.add_argument(
        "--max-model-len", type=parse_int, metavar="N", help="maximum tokens of a request (default: the model's)"
    )
    group.add_argument("--max-num-seqs", type=parse_int, default=64, metavar="N", help="maximum requests per step")
    group.add_argument(
        "--max-num-batched-tokens", type=parse_int, default=8192, metavar="N", help="maximum tokens per step"
    )
    group.add_argument("--enforce-eager", action="store_true", help="plan without CUDA graphs")
    group.add_argument("--tensor-parallel-size", type=parse_int, default=1, metavar="N", help="tensor-parallel GPUs")
    group.add_argument(
        "--pipeline-parallel-size", type=parse_int, default=1, metavar="N", help="pipeline-parallel GPUs"
    )
    group.add_argument(
        "--kv-host-memory", type=parse_size, default=0, metavar="SIZE", help="host memory for KV, per GPU"
    )
    group.add_argument(
        "--weights-on-host",
        type=parse_size,
        default=0,
        metavar="SIZE",
        help="weights in host memory, per GPU: the value of serve's --cpu-offload-gb minus the size of two layers, "
        "because the GPU always holds two of the offloaded layers",
    )
    group.add_argument(
        "--others",
        type=parse_size,
        metavar="SIZE",
        help="memory used by the driver and other programs (default: 0.8 GiB)",
    )
    group.add_argument("--lengths", default=LENGTHS, metavar="N,N…", help="request lengths to report concurrency for")


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--train", action="store_true", help="also estimate training")
    group.add_argument(
        "--batch-size", type=parse_int, default=1, metavar="N", help="sequences per forward pass, per GPU"
    )
    group.add_argument(
        "--length",
        type=parse_int,
        metavar="N",
        help="tokens per sequence (default: 2048, or the model's maximum)",
    )
    group.add_argument(
        "--precision",
        default="mixed",
        metavar="P",
        help="data types: mixed (16-bit weights and float32 master weights), autocast (torch's), bfloat16 or float32",
    )
    group.add_argument("--optimizer", default="adamw", metavar="O", help="adamw or sgd")
    group.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="recompute activations in the backward pass",
    )
    group.add_argument("--zero", type=parse_int, default=0, metavar="N", help="ZeRO stage, 0 to 3")
    group.add_argument(
        "--data-parallel-size", type=parse_int, default=1, metavar="N", help="data-parallel GPUs for ZeRO"
    )


def _serving_question(args: argparse.Namespace) -> InferenceQuestion:
    from kvscope_engine.planning.inference_plan import CONTEXT_BYTES, InferenceQuestion

    return InferenceQuestion(
        gpu_memory=args.gpu_memory,
        gpu_memory_utilization=args.gpu_memory_utilization,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        block_size=args.block_size,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enforce_eager=args.enforce_eager,
        tensor_parallel=args.tensor_parallel_size,
        pipeline_parallel=args.pipeline_parallel_size,
        kv_host_memory=args.kv_host_memory,
        weights_on_host=args.weights_on_host,
        others=CONTEXT_BYTES if args.others is None else args.others,
    )


def _training_question(args: argparse.Namespace) -> TrainingQuestion | None:
    if not args.train:
        return None
    from kvscope_engine.planning.training_plan import TrainingQuestion

    return TrainingQuestion(
        batch_size=args.batch_size,
        length=args.length,
        precision=args.precision,
        optimizer=args.optimizer,
        checkpointing=args.gradient_checkpointing,
        zero=args.zero,
        data_parallel=args.data_parallel_size,
    )


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not 1 <= len(lengths) <= MAX_LENGTHS or any(length < 1 for length in lengths):
        raise BadInput(f"--lengths {text!r:.60} is not accepted: up to {MAX_LENGTHS} whole numbers with commas between")
    return lengths
