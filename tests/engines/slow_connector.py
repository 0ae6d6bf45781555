"""A KV connector for vLLM that has some prefixes and takes time to load them; the driver says when they were loaded."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class SlowConnector(KVConnectorBase_V1):
    """A connector with the first 32 tokens of every third request, and of every ninth without a wait."""

    loading: ClassVar[dict[str, int]] = {}
    """Tokens of each request that are or were loaded from the connector."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        number = int(request.request_id[1:])
        if number % 3 or request.num_preemptions or num_computed_tokens >= 32 or request.num_tokens < 40:
            return 0, False
        return 32 - num_computed_tokens, number % 9 != 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.loading[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: there is no worker."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: there is no worker."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: there is no worker."""

    def wait_for_save(self) -> None:
        """Do nothing: there is no worker."""
