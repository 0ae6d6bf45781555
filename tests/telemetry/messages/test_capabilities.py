"""Capabilities of a source in its Hello; without them, the source is our own engine."""

import msgspec

from kvscope_telemetry.messages.capabilities import OWN_ENGINE, Capabilities
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Hello, ModelInfo


def _hello(**more: object) -> Hello:
    return msgspec.convert(
        {
            "type": "Hello",
            "epoch": 1,
            "time_ns": 2,
            "wall_time_ns": 3,
            "model": ModelInfo(name="m"),
            "cache": CacheInfo(num_blocks=4, block_size=16),
            "device": DeviceInfo(kind="cpu"),
            **more,
        },
        Hello,
        from_attributes=True,
    )


def test_hello_message_without_capabilities_means_kvscopes_own_engine() -> None:
    raw = msgspec.msgpack.encode(_hello())
    assert b"capabilities" not in raw
    assert msgspec.msgpack.decode(raw, type=Hello).capabilities == OWN_ENGINE
    assert not OWN_ENGINE.unknown_columns


def test_engine_capabilities_decoded_from_their_encoding_are_equal() -> None:
    capabilities = Capabilities(engine="vllm", owners=False, ref_counts=False, filled=False)
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(_hello(capabilities=capabilities)), type=Hello)
    assert back.capabilities == capabilities
    assert back.capabilities.unknown_columns == {"owner", "ref_count", "filled"}
