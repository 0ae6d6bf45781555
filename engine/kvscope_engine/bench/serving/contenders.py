"""Who is measured: our engine and what is installed of what a person would take instead, each with the same weights."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvscope_engine.bench.serving.codec import tokenizer_folder
from kvscope_engine.model.fetching.default_model import default_gguf
from kvscope_engine.model.fetching.names import ModelName
from kvscope_engine.model.running.cpu_count import usable_cores
from kvscope_telemetry.about import program_version

OURS: Final = "kvscope"
LLAMA_CPP: Final = "llama-cpp-python"
VLLM: Final = "vllm"
NAMES: Final = (OURS, LLAMA_CPP, VLLM)
_HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What every server is started with."""

    model: ModelName
    device: str
    num_threads: int | None
    """Of the model on a CPU; None: ours chooses, and others get as many as it has cores."""
    max_tokens: int
    """Of prompt and answer together."""
    engine_args: Sequence[str] = ()
    """More options of ours."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A server that can be started: `command` of a port and of a folder for its sockets."""

    name: str
    version: str
    command: Callable[[int, Path], list[str]]
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of requests that make it do the same work as the others."""
    knows_ignore_eos: bool = True
    note: str = ""
    """What a reader of its figures must know."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A contender that cannot take part, and why."""

    name: str
    why: str


def contender(name: str, wanted: Wanted) -> Contender | Absent:
    """The one called so. Raises KvscopeError where the default model cannot be had."""
    make = {OURS: _ours, LLAMA_CPP: _llama_cpp, VLLM: _vllm}[name]
    return make(wanted)


def _ours(wanted: Wanted) -> Contender:
    def command(port: int, folder: Path) -> list[str]:
        words = [sys.executable, "-m", "kvscope_engine.cli.main", "serve", "--endpoint", f"ipc://{folder}"]
        words += ["--http", f"{_HOST}:{port}", "--model", wanted.model.text, "--device", wanted.device]
        words += ["--num-threads", str(wanted.num_threads)] if wanted.num_threads is not None else []
        return [*words, *wanted.engine_args]

    return Contender(OURS, program_version(), command)


def _llama_cpp(wanted: Wanted) -> Contender | Absent:
    if why := _missing("llama_cpp", "llama-cpp-python[server]") or _missing_parts(LLAMA_CPP):
        return Absent(LLAMA_CPP, why)
    gguf = _gguf(wanted.model)
    if gguf is None:
        return Absent(LLAMA_CPP, "it reads .gguf files alone")
    threads = str(wanted.num_threads or usable_cores())

    def command(port: int, folder: Path) -> list[str]:
        words = [sys.executable, "-m", "llama_cpp.server", "--model", str(gguf), "--host", _HOST, "--port", str(port)]
        words += ["--n_ctx", str(wanted.max_tokens), "--n_threads", threads, "--n_threads_batch", threads]
        words += ["--n_gpu_layers", "0" if wanted.device == "cpu" else "-1", "--interrupt_requests", "false"]
        return [*words, "--verbose", "false"]

    extra = {"repeat_penalty": 1.0, "min_p": 0.0}
    version = _version("llama_cpp_python")
    return Contender(LLAMA_CPP, version, command, extra, knows_ignore_eos=False, note="answers one request at a time")


def _vllm(wanted: Wanted) -> Contender | Absent:
    if why := _missing("vllm", "vllm"):
        return Absent(VLLM, why)
    weights = _safetensors(wanted.model)
    if weights is None:
        return Absent(VLLM, "the model's weights are not there in a form that it reads: run ours once")

    def command(port: int, folder: Path) -> list[str]:
        words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", weights, "--host", _HOST]
        return [*words, "--port", str(port), "--max-model-len", str(wanted.max_tokens)]

    return Contender(VLLM, _version("vllm"), command)


def _missing(module: str, package: str) -> str:
    return "" if importlib.util.find_spec(module) else f"not installed (pip install '{package}')"


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _missing_parts(name: str) -> str:
    parts = ("fastapi", "pydantic_settings", "sse_starlette", "starlette_context")
    absent = [part for part in parts if not importlib.util.find_spec(part)]
    return f"its server lacks {', '.join(absent)} (pip install '{name}[server]')" if absent else ""


def _gguf(model: ModelName) -> Path | None:
    if model.kind == "default":
        return default_gguf(lambda progress: None)
    return model.path if model.kind == "gguf" else None


def _safetensors(model: ModelName) -> str | None:
    """What vLLM calls the same weights: of the default model the folder that ours made of it."""
    if model.kind == "default":
        made = tokenizer_folder(model)
        return None if made is None else str(made)
    return {"hub": model.text, "folder": str(model.path), "gguf": str(model.path)}.get(model.kind)
