"""A real engine process, usually with the real model, is watched over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.end_to_end.conftest import RunningEngine, run_engine
from tests.warm_python import WarmPython

from kvscope_telemetry import SourceState
from kvscope_telemetry.messages.commands import Abort, BlockText, GetBlockText, Refused


@pytest.fixture(scope="module")
def real_engine(warm_python: WarmPython) -> Iterator[RunningEngine]:
    """An engine with the real model, which takes seconds to load, and few blocks."""
    small = ("--num-gpu-blocks-override", "24", "--max-num-batched-tokens", "32", "--max-model-len", "384")
    with run_engine(warm_python, *small) as engine:
        yield engine


def _is_mirrored(talk) -> bool:  # type: ignore[no-untyped-def]
    """Return whether nothing runs and the mirror equals a new snapshot."""
    mirror = talk.source.mirror
    return mirror.hello is not None and mirror.counters.num_running == mirror.counters.num_waiting == 0


def test_client_of_a_live_engine_receives_full_answers_and_mirrors_its_cache_state(
    real_engine: RunningEngine, connect_client: Callable
) -> None:  # type: ignore[type-arg]
    talk = connect_client(real_engine)
    before = talk.source.mirror.counters
    for number in range(6):
        talk.submit(f"r{number}", f"Count from {number} to one hundred.", max_tokens=40, ignore_eos=True)
    talk.wait_for(lambda: len(talk.finished()) == 6)
    assert {reply.finish_reason for reply in talk.finished().values()} == {"length"}
    assert all(talk.text(f"r{number}").strip() for number in range(6))
    talk.wait_for(lambda: talk.source.mirror.counters.finished == before.finished + 6)
    mirror = talk.source.mirror
    assert mirror.counters.preemptions > before.preemptions, "six requests of 80 tokens do not fit in 24 blocks"
    assert mirror.num_active == 0
    late = connect_client(real_engine)
    late.wait_for(lambda: _is_mirrored(late))
    assert late.source.mirror.ledger.differences(mirror.ledger) == []
    assert late.source.mirror.seq == mirror.seq


def test_client_follows_a_killed_and_restarted_engine(
    start_engine: Callable,  # type: ignore[type-arg]
    connect_client: Callable,  # type: ignore[type-arg]
    tiny_model: Callable[..., str],
) -> None:
    """A tiny model is used, because a restart does not depend on the model."""
    tiny = ("--model", tiny_model(max_position_embeddings=65536), "--num-gpu-blocks-override", "4096")
    engine = start_engine(*tiny)
    talk = connect_client(engine)
    talk.submit_ids("long", range(3, 30), max_tokens=60_000)
    talk.wait_for(lambda: talk.source.mirror.num_active > 0)
    first_epoch = talk.source.mirror.epoch
    engine.kill()
    talk.wait_for(lambda: talk.source.status.state in (SourceState.STALE, SourceState.ENDED))
    assert talk.source.mirror.num_active > 0, "what was known is kept"
    start_engine(*tiny)
    talk.wait_for(lambda: talk.source.mirror.epoch not in (None, first_epoch))
    talk.submit_ids("again", range(3, 30), max_tokens=5)
    talk.wait_for(lambda: "again" in talk.finished())
    talk.wait_for(lambda: talk.source.mirror.counters.finished == 1)
    assert talk.source.mirror.num_active == 0


def test_abort_refusal_and_block_text_are_answered(real_engine: RunningEngine, connect_client: Callable) -> None:  # type: ignore[type-arg]
    talk = connect_client(real_engine)
    talk.submit("endless", "Tell me a very long story.", max_tokens=300, ignore_eos=True)
    talk.submit("too long", "word " * 3000, max_tokens=10)
    talk.submit("short", "Say hello.", max_tokens=4)
    talk.wait_for(lambda: "short" in talk.finished())
    refused = [reply for reply in talk.replies if isinstance(reply, Refused)]
    assert [reply.request_id for reply in refused] == ["too long"]
    assert "384" in refused[0].reason
    row = next(row for row, name in enumerate(talk.source.mirror.requests.request_ids) if name == "endless")
    number = int(talk.source.mirror.requests.number[row])
    block = int(talk.source.mirror.requests.table(number)[1])
    talk.source.send(GetBlockText(blocks=(block,), tag=5))
    talk.wait_for(lambda: any(isinstance(reply, BlockText) for reply in talk.replies))
    (content,) = next(reply for reply in talk.replies if isinstance(reply, BlockText)).contents
    assert (content.block, content.start, len(content.token_ids)) == (block, 16, 16)
    assert content.text.strip()
    talk.source.send(Abort(request_id="endless"))
    talk.wait_for(lambda: "endless" in talk.finished())
    assert talk.finished()["endless"].finish_reason == "abort"
    talk.wait_for(lambda: talk.source.mirror.num_active == 0)
