"""Translates the records of SGLang's hooks to ledger rows, requests and events.

Owns the texts of ended requests that still have pages, and attributes evictions to requests. `page_rows` publishes the
pages. Runs on the publishing thread, so it reads only SGLang objects that are immutable or append-only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kvscope_inside.cached_texts import BlockNotes
from kvscope_inside.sglang.eviction_beneficiary import EvictedCounts
from kvscope_inside.sglang.other_pools import hashes_of_windows
from kvscope_inside.sglang.page_rows import PageRows, SglangRequest
from kvscope_inside.sglang.pools import Pools
from kvscope_inside.sglang.sglang_recorder import SglangRecord
from kvscope_inside.sglang.text_hashes import hashes_of, text_sums, tokens_of
from kvscope_inside.sglang.text_keys import NameOf, TextBeginnings, TextKey, key_of, media_of
from kvscope_inside.translator import MissedBlock, StepCounts, Translator
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.messages.event_kinds import evicted_text, retracted_text
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.producer.cache_state import CacheState

MAX_ENDED_REQUESTS: Final = 1_000
"""Maximum number of ended requests whose last pages were not read yet."""
TEXT_CLEANUP_INTERVAL: Final = 256
"""Number of ended requests after which texts without pages are removed."""
_ABORTED: Final = "FINISH_ABORT"
_REASONS: Final = {
    "FINISH_MATCHED_TOKEN": "stop",
    "FINISH_MATCHED_STR": "stop",
    "FINISHED_MATCHED_REGEX": "stop",
    "FINISH_LENGTH": "length",
    _ABORTED: "aborted",
}
"""Map from SGLang's finish reason to a finish reason of `finished_text`."""


class SglangTranslator(Translator[SglangRequest]):
    """Translator for one scheduler with `pools`.

    Args:
        by_priority: Whether SGLang retracts requests by priority; otherwise it retracts those with the fewest generated
            tokens.
        policy: Eviction policy of cached pages.
        drafts_per_step: Number of draft tokens per request and step; 0 if it varies.
        name_of: Returns an adapter's name for SGLang's id.
    """

    def __init__(
        self,
        state: CacheState,
        *,
        pools: Pools,
        by_priority: bool = False,
        policy: str = "lru",
        drafts_per_step: int = 0,
        name_of: NameOf = lambda _: None,
    ) -> None:
        super().__init__(state)
        self.handlers = {
            "added": self._added,
            "scheduled": self._scheduled,
            "aborted": self._aborted,
            "evicted": self._evicted,
            "flushed": self._flushed,
        }
        self.pages = PageRows(self, pools, self._find, self._drop)
        self._by_priority, self._policy = by_priority, policy
        self._drafts_per_step, self._name_of = drafts_per_step, name_of
        self._beginnings = TextBeginnings()
        self._ended: OrderedDict[int, SglangRequest] = OrderedDict()
        """Ended requests that still have their table row, by the same keys as in `requests`."""
        self._ended_texts: dict[int, tuple[Any, TextKey, list[tuple[str, int, int]]]] = {}
        """Map from the number of an ended request that still has pages to its tokens, text key and media."""
        self._num_ended = 0
        self._evictions: dict[int, list[int]] = {}
        """Evictions in the current step. Map from the number of the request that needed the memory (0 if
        unknown) to the numbers of evicted full-attention blocks, window blocks and states.
        """

    def convert(self, record: SglangRecord) -> StepCounts:
        self._evictions = {}
        self.dispatch(record.events)
        self._report_evictions()
        decoding = self._decoding_numbers(record)
        batch = self._update_progress(record)
        for host, reason in record.ended:
            self._finished(host, type(reason).__name__)
        if record.pages is not None:
            self.pages.read(record.pages)
        states = [known.state for known in self.state.requests.values()]
        num_running = states.count(RequestState.RUNNING)
        num_decode_tokens = sum(batch.get(number, 0) for number in decoding)
        return StepCounts(num_running, len(states) - num_running, batch, num_decode_tokens)

    def request_tokens(self, request: SglangRequest, start: int, end: int) -> Sequence[int]:
        tokens: list[int] = tokens_of(request.host, start, end).tolist()
        return tokens

    def missed_block(self, request: SglangRequest, token: int) -> MissedBlock | None:
        """Return the page that begins at `token`, with kvscope's hash of its text, because SGLang has no hashes
        without KV events.
        """
        index = token // self.block_size
        hashes = request.hashes(index + 1, self.block_size)
        hash_values = [int(hashes[index])]
        if self.pages.windows is not None:
            hash_values.append(int(hashes_of_windows(hashes[index : index + 1])[0]))
        is_cached = bool((self.state.ledger.hash[: self.pages.num_rows] == hashes[index]).any())
        return MissedBlock(tuple(hash_values), int(hashes[index - 1]) if index else 0, is_cached)

    def miss_at_start(self, request: SglangRequest) -> str:
        """Return why the first page of the request's text missed the prefix cache: `"adapter"` or `"salt"` if a
        text with the same first page is cached under another adapter or salt, otherwise `"new"`.
        """
        plain = int(hashes_of(text_sums(tokens_of(request.host, 0, self.block_size), 0, 0)[-1:])[0])
        hashes = self.state.ledger.hash
        missed = self._beginnings.explain_miss(plain, request.key, lambda value: bool((hashes == value).any()))
        self._beginnings.record(plain, request.key, int(request.hashes(1, self.block_size)[0]))
        return missed

    def block_content(self, block: int) -> BlockContent:
        ledger, cache, windows = self.state.ledger, self.state.hello.cache, self.pages.windows
        number = int(ledger.owner[block]) if block < cache.first_state else NO_OWNER
        is_of_windows = self.pages.num_rows <= block < cache.num_blocks
        page = windows.page_of(block) if is_of_windows and windows is not None else block
        if number == NO_OWNER or page is None:
            return BlockContent(block=block)
        text, key, media = self._ended_texts.get(number, ((), TextKey(), []))
        request = self.request_by_number(number)
        if number not in self._ended_texts and request is not None:
            text = tokens_of(request.host, 0, request.known.num_computed_tokens)
            key, media = request.key, media_of(request.host)
        start = int(self.pages.positions[page]) * self.block_size
        tokens = tuple(map(int, text[start : start + int(ledger.filled[block])]))
        notes = _block_notes(key, media, start, len(tokens))
        return BlockContent(block=block, number=number, start=start, token_ids=tokens, notes=notes)

    def _find(self, host: Any) -> SglangRequest | None:
        """Return the published request for SGLang's request object `host`; None if it is unknown, for example
        because another object now has the same `id()`.
        """
        request = self.requests.get(id(host))
        return request if request is not None and request.host is host else None

    def _number(self, host: Any) -> int:
        request = self._find(host)
        return request.known.number if request is not None else 0

    # What happened.

    def _added(self, host: Any, at_ns: int, num_retractions: int, num_free: int, victim_of: Any = None) -> None:
        request = self._find(host)
        if request is None or request.has_ended:
            self._add(host, at_ns)
        elif num_retractions > request.num_retractions:
            self._retracted(request, num_free, self._number(victim_of))
            request.num_retractions = num_retractions

    def _add(self, host: Any, at_ns: int) -> SglangRequest:
        key = key_of(host, self._name_of)
        known = self.state.add_request(
            str(host.rid),
            num_prompt_tokens=len(host.origin_input_ids),
            arrival_ns=at_ns,
            max_tokens=int(getattr(host.sampling_params, "max_new_tokens", 0) or 0),
            priority=max(-(1 << 31), min(int(host.priority or 0), (1 << 31) - 1)),
            adapter=key.adapter,
        )
        request = self.requests[id(host)] = SglangRequest(host, known, known.info.arrival_ns, key=key)
        return request

    def _scheduled(self, host: Any, num_cached: int, num_loaded: int = 0) -> None:
        request = self._find(host) or self._add(host, self.step.time_ns)  # it may not have been queued
        if request.has_ended or request.is_running:
            return  # its prefill continues
        request.num_hits, request.num_hits_counted = num_cached // self.block_size, 0
        num_known = request.known.info.num_prompt_tokens + request.known.num_output_tokens
        has_states = self.pages.recurrent_states is not None
        self.start_request(
            request,
            time_ns=self.step.time_ns,
            num_cached_tokens=num_cached,
            num_blocks=-(-num_known // self.block_size),
            num_pool_blocks=max(0, num_cached - num_loaded) // self.block_size,
            num_loaded_blocks=min(num_loaded, num_cached) // self.block_size,
            num_states=int(has_states and num_cached > 0),  # a hit ends where the tree has a state
        )

    def _retracted(self, request: SglangRequest, num_free: int, other: int) -> None:
        known, num_tokens = request.known, request.known.num_computed_tokens
        num_blocks = -(-num_tokens // self.block_size)
        cause = retracted_text(
            known.number,
            "priority" if self._by_priority else "fewest",
            known.info.priority if self._by_priority else known.num_output_tokens,
            other=other,
            num_tokens=num_tokens,
            num_blocks=num_blocks,
            num_free_tokens=num_free,
        )
        self.blocks.release_tables(request)
        self.preempt_request(request, self.step.time_ns)
        self.events.report(
            "preempted", number=known.number, other=other, num_blocks=num_blocks, num_tokens=num_tokens, cause=cause
        )

    def _aborted(self, host: Any, num_outputs: int) -> None:
        self._finished(host, _ABORTED)

    def _evicted(self, evicted: EvictedCounts) -> None:
        size = self.block_size
        counts = [-(-evicted.num_tokens // size), -(-evicted.num_window_tokens // size), evicted.num_states]
        before = self._evictions.get(number := self._number(evicted.request), [0] * len(counts))
        self._evictions[number] = [a + b for a, b in zip(before, counts, strict=True)]

    def _report_evictions(self) -> None:
        if self._evictions:
            self.pages.evicted_at = self.step.number
        for number, counts in self._evictions.items():
            num_blocks = counts[0] + counts[1]
            self.state.count(evicted_blocks=num_blocks)
            order = f"in the order of SGLang's {self._policy}"
            cause = evicted_text(
                "too little was free",
                list(zip(counts, ("cached block", "cached window block", "cached state"), strict=True)),
                number=number,
                order=f"whole ends of prefixes, {order}" if counts[0] else order,
            )
            self.events.report("evicted", other=number, num_blocks=num_blocks, cause=cause)

    def _flushed(self) -> None:
        is_cached = self.state.ledger.state == BlockState.CACHED
        first_state = self.state.hello.cache.first_state
        num_blocks, num_states = (int(np.count_nonzero(part)) for part in np.split(is_cached, [first_state]))
        for request in [request for request in self.requests.values() if request.has_ended]:
            self._drop(request)
        for request in self.requests.values():
            request.forget_pages()
        self._ended_texts.clear()
        self.evicted_hashes.clear()
        self.pages.clear()
        self.events.report_emptied(num_blocks, num_states=num_states)

    def _finished(self, host: Any, reason: str) -> None:
        request = self._find(host)
        if request is None or request.has_ended:
            return
        request.has_ended = True
        num_blocks = len(request.known.tables[0])
        finish_reason = _REASONS.get(reason, reason.lower())
        self.finish_request(request, finish_reason, num_blocks, is_aborted=reason == _ABORTED)
        if not request.was_admitted:
            self._drop(request)
            return
        tokens = tokens_of(host, 0, len(host.origin_input_ids) + len(host.output_ids)).astype(np.int32)
        self._ended_texts[request.known.number] = tokens, request.key, media_of(host)
        self._ended[id(host)] = request
        if len(self._ended) > MAX_ENDED_REQUESTS:
            self._drop(next(iter(self._ended.values())))
        self._num_ended += 1
        if self._num_ended % TEXT_CLEANUP_INTERVAL == 0:
            self._drop_unused_texts()

    def _drop_unused_texts(self) -> None:
        ended = {request.known.number for request in self._ended.values()}
        needed = set(np.unique(self.state.ledger.owner).tolist()) | ended
        self._ended_texts = {number: text for number, text in self._ended_texts.items() if number in needed}

    def _drop(self, request: SglangRequest) -> None:
        key = id(request.host)
        self._ended.pop(key, None)
        if self.requests.pop(key, None) is not None:
            self.pages.release(request)

    # State after the step.

    def _decoding_numbers(self, record: SglangRecord) -> list[int]:
        if record.ran is None:
            return []
        requests = [self._find(host) for host in record.ran.requests]
        return [
            request.known.number
            for request, num_tokens in zip(requests, record.ran.num_tokens, strict=True)
            if request is not None and request.known.num_output_tokens and num_tokens == 1
        ]

    def _update_progress(self, record: SglangRecord) -> dict[int, int]:
        """Publish the progress of each request that ran. Returns a map from request number to the number of
        tokens run in the step.
        """
        batch: dict[int, int] = {}
        if record.ran is None:
            return batch
        for index, (host, num_tokens) in enumerate(zip(record.ran.requests, record.ran.num_tokens, strict=True)):
            request = self._find(host)
            if request is None or request.has_ended:
                continue
            self.state.set_num_output_tokens(request.known, record.num_outputs[index], self.step.time_ns)
            if request.is_running:
                request.known.num_computed_tokens = record.computed[index]
            batch[request.known.number] = num_tokens
            if record.draft_counts and self._drafts_per_step:
                num_steps, num_accepted = record.draft_counts[index]
                self.count_drafts(request, num_steps * self._drafts_per_step, num_accepted)
            self.state.touch(request.known)
        return batch


def _block_notes(key: TextKey, media: Sequence[tuple[str, int, int]], start: int, count: int) -> BlockNotes:
    """Return the text key and the media of `count` tokens of a text from position `start` on, as pairs of name
    and value.
    """
    overlapping = [item for item in media if item[1] < start + count and start <= item[2]]
    return (*key.notes(), *((kind, f"tokens {first} to {last} of the prompt") for kind, first, last in overlapping))
