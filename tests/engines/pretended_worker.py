"""The worker side of vLLM's OffloadingConnector without a worker: transfers take time and copy nothing."""

from __future__ import annotations

import random
from typing import Any


class PretendedWorker:
    """The worker of one scheduler; `begin` receives the output of each step."""

    def __init__(self, chance: random.Random, blocks_per_place: int) -> None:
        self._random, self._per_place = chance, blocks_per_place
        self.skipped: dict[int, int] = {}
        """Number of unwritten blocks at the beginning of each slot."""
        self._stores: list[int] = []
        self._loads: dict[int, str] = {}
        self._must_end: set[int] = set()

    def begin(self, output: Any) -> None:
        """Start the transfers of a step, and finish those that must end before its tokens are computed."""
        metadata = output.kv_connector_metadata
        self._stores += metadata.store_jobs
        for job in metadata.store_jobs.values():
            self._note_skipped(job.src_spec, job.dst_spec.block_ids.tolist())
        self._loads |= {job: load.req_id for job, load in metadata.load_jobs.items()}
        self._must_end |= set(metadata.jobs_to_flush or ())

    def _note_skipped(self, source: Any, places: list[int]) -> None:
        """Count which part of a slot each block goes to, like vLLM's worker."""
        for first, count in zip(source.block_indices, source.group_sizes, strict=True):
            skip = first % self._per_place if count else 0
            num_places = -(-(skip + count) // self._per_place)
            self.skipped |= dict.fromkeys(places[:num_places], 0)
            if num_places:
                self.skipped[places[0]] = skip
            del places[:num_places]
        assert not places

    def ended(self) -> Any:
        """Return what ended after a step."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
        from vllm.v1.outputs import KVConnectorOutput

        stored = {job for job in self._stores if job in self._must_end or self._random.random() < 0.4}
        loaded = {job for job in self._loads if job in self._must_end or self._random.random() < 0.4}
        self._must_end.clear()
        self._stores = [job for job in self._stores if job not in stored]
        requests = {self._loads.pop(job) for job in sorted(loaded)}
        done = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(sorted(stored | loaded), 1))
        return KVConnectorOutput(finished_recving=requests or None, kv_connector_worker_meta=done)


class PretendedRequestWorker:
    """The same for vLLM 0.20, where a request is written as a whole: it ends with all of its transfers."""

    def __init__(self, chance: random.Random) -> None:
        self._random = chance
        self._num_stores: dict[str, int] = {}
        self._loads: list[str] = []
        self._finished: set[str] = set()

    def begin(self, output: Any) -> None:
        metadata = output.kv_connector_metadata
        for request in metadata.reqs_to_store:
            self._num_stores[request] = self._num_stores.get(request, 0) + 1
        for request in metadata.reqs_to_flush or ():
            if request in self._num_stores:
                self._num_stores[request] = 0
        self._loads += metadata.reqs_to_load
        self._finished |= output.finished_req_ids & self._num_stores.keys()

    def ended(self) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        for request, count in self._num_stores.items():
            if count and self._random.random() < 0.4:
                self._num_stores[request] = count - 1
        sent = {request for request in self._finished if not self._num_stores[request]}
        loaded = {request for request in self._loads if self._random.random() < 0.4}
        self._finished -= sent
        self._num_stores = {name: count for name, count in self._num_stores.items() if name not in sent}
        self._loads = [request for request in self._loads if request not in loaded]
        return KVConnectorOutput(finished_sending=sent or None, finished_recving=loaded or None)


class PretendedPoolWorker:
    """The same for SimpleCPUOffloadConnector: the stores of a step end together, and so do its loads."""

    def __init__(self, chance: random.Random) -> None:
        self._random = chance
        self._stores: list[int] = []
        self._loads: list[list[str]] = []

    def begin(self, output: Any) -> None:
        metadata = output.kv_connector_metadata
        if metadata.store_event >= 0:
            self._stores.append(metadata.store_event)
        if metadata.load_event >= 0:
            self._loads.append(list(metadata.load_event_to_reqs.get(metadata.load_event, ())))

    def ended(self) -> Any:
        from vllm.v1.outputs import KVConnectorOutput
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        stored = [event for event in self._stores if self._random.random() < 0.4]
        self._stores = [event for event in self._stores if event not in stored]
        loaded = self._loads.pop(0) if self._loads and self._random.random() < 0.4 else []
        done = SimpleCPUOffloadWorkerMetadata(completed_store_events=dict.fromkeys(stored, 1)) if stored else None
        return KVConnectorOutput(finished_recving=set(loaded) or None, kv_connector_worker_meta=done)


def worker_for(chance: random.Random, blocks_per_place: int) -> PretendedWorker | PretendedRequestWorker:
    """Return the worker of this version of vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common

    is_by_job = hasattr(common, "OffloadingWorkerMetadata")
    return PretendedWorker(chance, blocks_per_place) if is_by_job else PretendedRequestWorker(chance)
