"""Digests of prefixes, and the block that holds each."""

from __future__ import annotations

import hashlib
import struct

import pytest

from kvscope_engine.policy.kv_groups import ONE_GROUP, find_prefix
from kvscope_engine.policy.prefixes.prefix_index import Prefix, PrefixIndex, pack_tokens, published_hash


def digests_of(index: PrefixIndex, tokens: list[int]) -> list[bytes]:
    digests: list[bytes] = []
    index.extend(digests, tokens)
    return digests


def test_digest_is_sha256_of_parent_and_tokens() -> None:
    index = PrefixIndex(2, salt=b"s")
    first = hashlib.sha256(hashlib.sha256(b"s").digest() + struct.pack("<2i", 1, 2)).digest()
    second = hashlib.sha256(first + struct.pack("<2i", 3, 4)).digest()
    assert digests_of(index, [1, 2, 3, 4]) == [first, second]


def test_only_full_blocks_have_digests() -> None:
    index = PrefixIndex(4, salt=b"s")
    assert len(digests_of(index, [1] * 3)) == 0
    assert len(digests_of(index, [1] * 11)) == 2


def test_prefix_digests_extended_with_new_tokens_equal_those_of_the_whole_text() -> None:
    index = PrefixIndex(2, salt=b"s")
    digests = digests_of(index, [1, 2, 3, 4])
    index.extend(digests, [5, 6, 7])
    assert digests == digests_of(index, [1, 2, 3, 4, 5, 6])


def test_same_tokens_after_another_text_have_another_digest() -> None:
    index = PrefixIndex(2, salt=b"s")
    assert digests_of(index, [1, 2, 8, 9])[1] != digests_of(index, [3, 4, 8, 9])[1]


def test_other_engines_and_extra_keys_have_other_digests() -> None:
    tokens = pack_tokens([1, 2])
    index = PrefixIndex(2)
    assert index.block_digest(None, tokens) != PrefixIndex(2).block_digest(None, tokens)
    assert index.block_digest(None, tokens) != index.block_digest(None, tokens, b"adapter")


def test_salt_changes_all_digests_of_a_text() -> None:
    index = PrefixIndex(2, salt=b"s")
    tokens = [1, 2, 3, 4, 5, 6]
    found = []
    for salt in ("", "mine", "yours", "mine"):
        digests: list[bytes] = []
        index.extend(digests, tokens[:2], salt)
        index.extend(digests, tokens[2:], salt)
        found.append(digests)
    plain, mine, yours, again = found
    assert plain == digests_of(index, tokens), "without one it is as it was"
    assert mine == again
    assert len({*plain, *mine, *yours}) == 9
    assert mine[0] == index.block_digest(None, pack_tokens([1, 2]), b"mine")
    assert mine[1] == index.block_digest(mine[0], pack_tokens([3, 4])), "later digests differ only by their parent"


def test_published_hash_is_never_zero() -> None:
    assert published_hash(b"\x00" * 32) == 1
    assert published_hash(b"\xff" * 24 + b"\x00" * 6 + b"\x01\x02") == 0x0102


def find(index: PrefixIndex, digests: list[bytes]) -> list[int]:
    found = find_prefix(ONE_GROUP, digests, 2, index.get)
    return found.tables[0] if found.tables else []


def test_prefix_hit_ends_before_the_first_missing_block() -> None:
    index = PrefixIndex(2, salt=b"s")
    tokens = [1, 2, 3, 4, 5, 6]
    digests = digests_of(index, tokens)
    for block, place in ((10, 0), (30, 2)):
        index.insert(block, Prefix(digests[place], 2 * place, pack_tokens(tokens[2 * place : 2 * place + 2])))
    assert find(index, digests) == [10]
    index.insert(20, Prefix(digests[1], 2, pack_tokens([3, 4])))
    assert find(index, digests) == [10, 20, 30]
    index.remove(10)
    assert find(index, digests) == []


def test_second_block_of_the_same_text_is_not_inserted() -> None:
    index = PrefixIndex(2, salt=b"s")
    prefix = Prefix(digests_of(index, [1, 2])[0], 0, pack_tokens([1, 2]))
    assert index.insert(5, prefix)
    assert not index.insert(6, prefix)
    assert index.prefix(6) is None
    assert index.items() == [(5, prefix)]
    assert prefix.token_ids == (1, 2)


def test_clearing_the_prefix_index_returns_all_its_blocks() -> None:
    index = PrefixIndex(1, salt=b"s")
    digests = digests_of(index, [1, 2])
    index.insert(3, Prefix(digests[0], 0, pack_tokens([1])))
    index.insert(9, Prefix(digests[1], 1, pack_tokens([2])))
    assert sorted(index.clear()) == [3, 9]
    assert len(index) == 0
    assert find(index, digests) == []


def test_token_beyond_int32_is_an_error() -> None:
    with pytest.raises(struct.error):
        pack_tokens([1 << 31])
