"""What KV events say about blocks besides tokens: adapters, sessions, salts, multimodal parts, and unreadable keys."""

from __future__ import annotations

import msgspec

from kvscope_telemetry.collectors.block_contents import BlockContents
from kvscope_telemetry.collectors.block_notes import MAX_CHARACTERS, MAX_NOTES, notes_of
from kvscope_telemetry.collectors.block_tokens import BlockTokens
from kvscope_telemetry.kv_events.batches import BlockStored

RUN = BlockStored((1, 2), None, (10, 11, 12, 13), 2)


def with_keys(keys: object, **more: str) -> BlockStored:
    return msgspec.structs.replace(RUN, extra_keys=msgspec.msgpack.encode(keys), **more)


def test_blocks_without_extra_keys_have_no_notes() -> None:
    assert notes_of(RUN) == notes_of(with_keys([None, None])) == [(), ()]


def test_kv_event_extra_keys_become_notes_about_adapter_session_salt_and_images_of_blocks() -> None:
    run = with_keys([["sql", ["img-7", 3]], ["sql", "salt"]], lora_name="sql", session_id="s-1")
    of_run = (("LoRA", "sql"), ("Session", "s-1"))
    assert notes_of(run) == [
        (*of_run, ("Multimodal part", "img-7, from token 3 of the block")),
        (*of_run, ("Cache salt", "salt")),
    ]
    assert notes_of(with_keys([None, [b"\xab\xcd"]])) == [(), (("Embeddings", "abcd"),)]
    sglang = msgspec.structs.replace(RUN, cache_salt="pepper", lora_id=4)
    assert notes_of(sglang)[0] == (("LoRA", "4"), ("Cache salt", "pepper"))


def test_unreadable_keys_are_ignored_and_long_ones_are_truncated() -> None:
    for keys in (["one"], [None], {"a": 1}, 7, [None, None, None]):
        assert notes_of(with_keys(keys)) == [(), ()]
    (first, _) = notes_of(with_keys([["\n" + "x" * 1000] * 100, None]))
    assert len(first) == MAX_NOTES
    assert first[0] == ("Cache salt", "?" + "x" * (MAX_CHARACTERS - 1))


def test_notes_are_part_of_block_contents_and_dropped_with_their_tokens() -> None:
    tokens = BlockTokens(max_bytes=2000)
    tokens.add(msgspec.structs.replace(RUN, lora_name="sql"))
    contents = BlockContents(tokens, lambda row: row)
    assert [content.notes for content in contents.of_rows((1, 3), "")] == [(("LoRA", "sql"),), ()]
    for number in range(3, 40):
        tokens.add(BlockStored((number,), None, (1, 2), 2, lora_name="other"))
    assert tokens.notes(1) == ()
    assert tokens.notes(39) == (("LoRA", "other"),)
