"""kvscope's engine as a contender. Prefix caching is off, so that each run computes all of its prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvscope_engine.bench.workloads import BenchWorkload
from kvscope_engine.engine import Engine
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.messages.commands import Finished, Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage


def on_one_thread(model: str, dtype: str, quantization: str = "auto") -> EngineConfig:
    """Return a configuration for up to 64 requests of 1,024 tokens, on one CPU thread."""
    return EngineConfig(
        model=model,
        dtype=dtype,
        quantization=quantization,
        device="cpu",
        num_threads=1,
        max_num_seqs=64,
        max_model_len=1024,
        num_gpu_blocks_override=2048,
        enable_prefix_caching=False,
    )


class OurEngine:
    """kvscope's engine as a contender. Runs workloads with `step`, and adds up the time spent in each part of
    a step.
    """

    name = "kvscope"

    def __init__(self, config: EngineConfig) -> None:
        self._forward_ns = 0
        self._step_ns = 0
        self._publish: Callable[[TelemetryMessage], None] | None = None
        self.engine = Engine(config, publish=self._receive)

    def publish_to(self, publish: Callable[[TelemetryMessage], None] | None) -> None:
        """Set the function that receives each telemetry message from now on; None for no function."""
        self._publish = publish

    def run(self, workload: BenchWorkload) -> None:
        """Submit each request when it arrives, and step until all have finished."""
        self._forward_ns = self._step_ns = 0
        arrivals = deque(enumerate(zip(workload.arrivals, workload.prompts, workload.output_tokens, strict=True)))
        num_unfinished, step = workload.num_requests, 0
        while num_unfinished:
            while arrivals and (arrivals[0][1][0] <= step or not self.engine.has_unfinished):
                index, (_, prompt, count) = arrivals.popleft()
                sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                self.engine.submit(Submit(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
            num_unfinished -= sum(isinstance(message, Finished) for message in self.engine.step())
            step += 1

    @property
    def overhead_share(self) -> float:
        """Share of the last run's step time spent outside the model's forward pass, from 0 to 1."""
        return 1.0 - self._forward_ns / self._step_ns

    def _receive(self, message: TelemetryMessage) -> None:
        if isinstance(message, Frame) and message.timings.forward_ns:
            parts = message.timings
            self._forward_ns += parts.forward_ns
            self._step_ns += parts.schedule_ns + parts.run_ns + parts.commit_ns + parts.record_ns
        if self._publish is not None:
            self._publish(message)
