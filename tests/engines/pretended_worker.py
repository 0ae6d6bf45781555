"""The worker's side of vLLM's OffloadingConnector, without one: transfers take their time and move nothing."""

from __future__ import annotations

import random
from typing import Any


class PretendedWorker:
    """Of one scheduler. `begin` is given what each step would give to a worker."""

    def __init__(self, chance: random.Random) -> None:
        self._random = chance
        self._stores: list[int] = []
        self._loads: dict[int, str] = {}
        self._must_end: set[int] = set()
        self.num_stored = self.num_loaded = 0

    def begin(self, metadata: Any) -> None:
        """Transfers of a step, and those that must be over before its tokens are computed."""
        self._stores += metadata.store_jobs
        self._loads |= {job: load.req_id for job, load in metadata.load_jobs.items()}
        self._must_end |= set(metadata.jobs_to_flush or ())

    def ended(self) -> Any:
        """What is over after a step."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
        from vllm.v1.outputs import KVConnectorOutput

        stored = {job for job in self._stores if job in self._must_end or self._random.random() < 0.4}
        loaded = {job for job in self._loads if job in self._must_end or self._random.random() < 0.4}
        self._must_end.clear()
        self._stores = [job for job in self._stores if job not in stored]
        requests = {self._loads.pop(job) for job in sorted(loaded)}
        self.num_stored, self.num_loaded = self.num_stored + len(stored), self.num_loaded + len(loaded)
        done = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(sorted(stored | loaded), 1))
        return KVConnectorOutput(finished_recving=requests or None, kv_connector_worker_meta=done)
