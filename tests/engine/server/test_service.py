"""The engine service runs in one process and answers clients in every state of the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvscope_engine.server.served_engine import MessagesDropped, OnProgress, Publish
from kvscope_engine.server.service import EngineService
from kvscope_engine.server.service_limits import MIB, Bound, ServiceLimits
from kvscope_telemetry.errors import EngineDead
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    BlockText,
    ChatMessage,
    Control,
    Done,
    EstimatePrompt,
    Evict,
    Failed,
    Finished,
    GetBlockText,
    GetSnapshot,
    GetStatus,
    PromptEstimate,
    Refused,
    Status,
    Submit,
    Tokens,
)
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import (
    DeviceSample,
    Frame,
    Goodbye,
    Heartbeat,
    MemoryBreakdown,
    Progress,
    Snapshot,
)

if TYPE_CHECKING:
    from conftest import Client


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


class Running:
    """A service on its own thread, and the engine that it built."""

    def __init__(self, folder: Path, fake: ModuleType, limits: ServiceLimits | None = None, **options: Any) -> None:
        self.engine: Any = None
        self.error: Exception | None = None
        self._build = fake.builder(fake.FakeEngineOptions(**options))
        self.service = EngineService(f"ipc://{folder}", self._build_and_keep, limits=limits)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive(), "the service did not end"

    def stop(self) -> None:
        self.service.stop()
        self.join()

    def _build_and_keep(self, progress: OnProgress, publish: Publish, messages_dropped: MessagesDropped) -> Any:
        self.engine = self._build(progress, publish, messages_dropped)
        return self.engine

    def _run(self) -> None:
        try:
            self.service.run()
        except Exception as error:
            self.error = error


@pytest.fixture
def start_service(folder: Path, fake: ModuleType) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def make(**options: Any) -> Running:
        started.append(Running(folder, fake, **options))
        return started[-1]

    yield make
    for running in started:
        running.stop()


def submit(request_id: str, prompt: str = "hello", **sampling: Any) -> Submit:
    return Submit(request_id=request_id, prompt=prompt, sampling=SamplingParams(**sampling))


ENDLESS = 1_000_000


# A request's life


def test_submitted_request_is_accepted_streamed_and_finished(
    start_service: Callable[..., Running], client: Client
) -> None:
    start_service()
    client.wait_ready()
    tokens, finished = client.run(submit("a", max_tokens=5))
    assert Accepted(request_id="a", numbers=(1,), num_prompt_tokens=5) in client.replies
    assert len(tokens) == 5
    assert (finished.finish_reason, finished.usage.completion_tokens) == ("length", 5)


def test_engine_is_called_idle_only_while_no_request_is_unfinished(
    start_service: Callable[..., Running], client: Client
) -> None:
    """The engine is called idle once before the first request and again after it; the fake engine raises otherwise."""
    running = start_service(step_s=0.001)
    client.wait_ready()
    wait_for(lambda: running.engine.num_idle > 0)
    before = running.engine.num_idle
    client.run(submit("a", max_tokens=5))
    wait_for(lambda: running.engine.num_idle > before)
    client.send(submit("b", max_tokens=ENDLESS))
    client.receive(Tokens)
    client.ask(Control(action="pause", tag=1), Done)
    client.ask(Control(action="resume", tag=2), Done)
    client.ask(Abort(request_id="b"), Done)
    assert running.error is None


def test_replies_of_several_completions_and_clients_do_not_mix(
    start_service: Callable[..., Running], new_client: Callable[[], Client]
) -> None:
    start_service()
    clients = [new_client() for _ in range(3)]
    clients[0].wait_ready()
    for number, client in enumerate(clients):
        client.send(submit(f"r{number}", n=2, max_tokens=4))
    for number, client in enumerate(clients):
        ends = [client.receive(Finished) for _ in range(2)]
        assert sorted(end.index for end in ends) == [0, 1]
        said = [reply for reply in client.replies if isinstance(reply, Tokens | Finished)]
        assert {reply.request_id for reply in said} == {f"r{number}"}
        assert len(said) == 10


@pytest.mark.parametrize(("prompt", "reason"), [("", "the prompt is empty"), ("bug", "a bug in submit")])
def test_refused_request_leaves_nothing_and_does_not_affect_others(
    start_service: Callable[..., Running], client: Client, prompt: str, reason: str
) -> None:
    start_service(step_s=0.001)
    client.wait_ready()
    client.send(submit("good", max_tokens=50))
    refused = client.ask(submit("bad", prompt), Refused)
    assert refused.request_id == "bad"
    assert reason in refused.reason
    finished = client.receive(Finished)
    assert (finished.request_id, finished.usage.completion_tokens) == ("good", 50)
    client.run(submit("bad", max_tokens=1))


def test_ten_bad_requests_do_not_affect_ten_good_ones_behind_them(
    start_service: Callable[..., Running], client: Client
) -> None:
    start_service()
    client.wait_ready()
    for number in range(10):
        client.send(submit(f"bad{number}", ""))
    for number in range(10):
        client.send(submit(f"good{number}", max_tokens=3))
    ends = {client.receive(Finished).request_id for _ in range(10)}
    refused = {reply.request_id for reply in client.replies if isinstance(reply, Refused)}
    assert (ends, refused) == ({f"good{n}" for n in range(10)}, {f"bad{n}" for n in range(10)})


def test_request_id_in_use_is_refused_and_the_first_request_continues(
    start_service: Callable[..., Running], new_client: Callable[[], Client]
) -> None:
    start_service(step_s=0.001)
    first, second = new_client(), new_client()
    first.wait_ready()
    first.ask(submit("same", max_tokens=100), Accepted)
    for client in (first, second):
        assert "in use" in client.ask(submit("same"), Refused).reason
    assert first.receive(Finished).usage.completion_tokens == 100
    assert second.run(submit("same", max_tokens=2))[1].finish_reason == "length"


def test_abort_ends_a_request_at_once_and_can_be_repeated(
    start_service: Callable[..., Running], client: Client
) -> None:
    running = start_service(step_s=0.001)
    client.wait_ready()
    client.send(submit("a", max_tokens=ENDLESS))
    client.receive(Tokens)
    assert client.ask(Abort(request_id="a"), Done).request_id == "a"
    assert client.receive(Finished).finish_reason == "abort"
    assert client.ask(Abort(request_id="a"), Done).request_id == "a", "aborting twice has no effect"
    assert client.ask(Abort(request_id="never seen"), Done).request_id == "never seen"
    assert not running.engine.running


@pytest.mark.parametrize("state", ["running", "being prepared", "paused"])
def test_one_completion_is_aborted_and_the_others_continue(
    start_service: Callable[..., Running], client: Client, state: str
) -> None:
    start_service(prompt_s=0.3 if state == "being prepared" else 0.0)
    client.wait_ready()
    client.send(submit("a", "slow", n=3, max_tokens=ENDLESS))
    if state != "being prepared":
        client.receive(Accepted)
    if state == "paused":
        client.ask(Control(action="pause"), Done)
    client.send(Abort(request_id="a", index=1))
    assert client.receive(Finished).index == 1
    if state == "paused":
        client.ask(Control(action="resume"), Done)
    client.send(Abort(request_id="a"))
    assert {client.receive(Finished).index for _ in range(2)} == {0, 2}


def test_client_cannot_abort_the_request_of_another_client(
    start_service: Callable[..., Running], new_client: Callable[[], Client]
) -> None:
    start_service(step_s=0.001)
    owner, stranger = new_client(), new_client()
    owner.wait_ready()
    owner.ask(submit("mine", max_tokens=100), Accepted)
    refusal = stranger.ask(Abort(request_id="mine"), Failed)
    assert refusal.request_id == "mine"
    assert "another client" in refusal.reason
    assert owner.receive(Finished).finish_reason == "length"


def test_requests_of_a_client_that_left_are_aborted(
    start_service: Callable[..., Running], new_client: Callable[[], Client], client: Client
) -> None:
    running = start_service(step_s=0.001)
    client.wait_ready()
    leaving = new_client()
    for name in "abc":
        leaving.ask(submit(name, max_tokens=ENDLESS), Accepted)
    client.ask(submit("stays", max_tokens=ENDLESS), Accepted)
    leaving.dealer.close(linger=0)
    deadline = time.monotonic() + 60
    while {completion.request_id for completion in running.engine.running} != {"stays"}:
        assert time.monotonic() < deadline, "the engine still works on requests of a client that left"
        time.sleep(0.002)


def test_many_aborts_leave_no_open_request(start_service: Callable[..., Running], client: Client) -> None:
    running = start_service(step_s=0.01)  # a faster engine would make this client count as one that does not read
    client.wait_ready()
    for number in range(300):
        client.send(submit(f"r{number}", max_tokens=ENDLESS if number % 2 else 5))
    for number in range(300):
        client.send(Abort(request_id=f"r{number}"))
    ends = [client.receive(Finished) for _ in range(300)]
    assert len({end.request_id for end in ends}) == 300
    assert not running.engine.running


def test_every_one_of_a_thousand_invalid_submissions_gets_an_answer(
    start_service: Callable[..., Running], client: Client
) -> None:
    """Sampling values are checked where the bytes are parsed: no invalid value reaches the engine."""
    start_service()
    client.wait_ready()
    absurd: list[Any] = [float("nan"), float("inf"), -1, 1 << 31, -(1 << 63), "x", [], None, 0, 101, 1e300]
    names = [field.name for field in msgspec.structs.fields(SamplingParams)]
    sent = 0
    for number in range(1_000):
        name, value = names[number % len(names)], absurd[number // len(names) % len(absurd)]
        sampling = {"max_tokens": 1, name: value}
        message = {"type": "Submit", "request_id": f"r{number}", "prompt": "p", "sampling": sampling}
        client.dealer.send(msgspec.msgpack.encode(message))
        sent += 1
    refusals = answered = 0
    while answered < sent:
        reply = client.receive(object)
        if isinstance(reply, Accepted | Failed | Refused):
            answered += 1
            refusals += not isinstance(reply, Accepted)
    assert refusals > 500
    client.send(Control(action="shutdown"))


# Other commands


def test_status_snapshot_block_text_and_prefix_cache_reset_are_answered(
    start_service: Callable[..., Running], client: Client
) -> None:
    running = start_service()
    status = client.wait_ready()
    assert status.hello == running.engine.hello
    assert status.telemetry_endpoint == running.service.telemetry_endpoint
    client.run(submit("a", max_tokens=3))
    snapshot = client.ask(GetSnapshot(tag=41), Snapshot)
    assert (snapshot.tag, snapshot.seq) == (41, running.engine.last_seq)
    again = client.ask(GetSnapshot(tag=42), Snapshot)
    assert again.tag == 42
    assert again.time_ns > snapshot.time_ns, "a recording that begins with it begins now"
    text = client.ask(GetBlockText(blocks=(3, 1), tag=43), BlockText)
    assert (text.tag, [content.block for content in text.contents]) == (43, [3, 1])
    assert client.ask(Control(action="reset_prefix_cache", tag=44), Done).tag == 44


def test_prompt_is_estimated_without_a_request_and_a_failure_has_the_reason(
    start_service: Callable[..., Running], client: Client
) -> None:
    running = start_service()
    client.wait_ready()
    messages = (ChatMessage(role="user", content="before"), ChatMessage(role="user", content="draft"))
    estimate = client.ask(EstimatePrompt(messages=messages, tag=4), PromptEstimate)
    assert (estimate.num_prompt_tokens, estimate.num_draft_tokens, estimate.tag) == (11, 5, 4)
    failed = client.ask(EstimatePrompt(messages=messages, adapter="sql", tag=5), Failed)
    assert (failed.reason, failed.tag) == ("LoRA adapter 'sql' is not loaded", 5)
    assert running.engine.num_unfinished == running.engine.step_count == 0


def test_refusal_says_whether_the_prompt_was_too_long(start_service: Callable[..., Running], client: Client) -> None:
    start_service()
    client.wait_ready()
    assert client.ask(submit("a", "long prompt"), Refused).is_too_long
    assert not client.ask(submit("b", ""), Refused).is_too_long


def test_snapshot_is_never_older_than_the_last_step(start_service: Callable[..., Running], client: Client) -> None:
    start_service()
    client.wait_ready()
    for number in range(5):
        client.run(submit(f"r{number}", max_tokens=2))
        first, second = (client.ask(GetSnapshot(tag=tag), Snapshot) for tag in (1, 2))
        assert first.step == second.step == 2 * (number + 1)


def test_paused_engine_holds_requests_until_it_is_resumed(
    start_service: Callable[..., Running], client: Client
) -> None:
    running = start_service(step_s=0.001)
    client.wait_ready()
    client.send(submit("a", max_tokens=200))
    client.send(submit("b", max_tokens=200))
    client.receive(Tokens)
    client.ask(Control(action="pause", tag=1), Done)
    assert client.ask(GetStatus(), Status).paused
    step = running.engine.step_count
    client.send(Abort(request_id="b"))
    assert client.receive(Finished).finish_reason == "abort", "told while nothing steps"
    client.ask(submit("c", max_tokens=1), Accepted)
    assert running.engine.step_count == step
    client.ask(Control(action="resume", tag=2), Done)
    assert {client.receive(Finished).request_id for _ in range(2)} == {"a", "c"}
    assert not client.ask(GetStatus(), Status).paused


def test_idle_engine_uses_no_cpu_and_sends_no_frames(start_service: Callable[..., Running], client: Client) -> None:
    running = start_service()
    client.wait_ready()
    client.run(submit("a", max_tokens=1))
    seq, used = running.engine.last_seq, []
    for _ in range(20):  # other threads of this process sometimes have work of their own
        began = time.process_time()
        client.telemetry(Heartbeat)
        used.append(time.process_time() - began)
        if min(used) < 0.1:
            break
    assert running.engine.last_seq == seq
    assert min(used) < 0.1, "an idle engine used the CPU"


def test_shutdown_ends_requests_telemetry_and_engine_in_order(
    start_service: Callable[..., Running], client: Client
) -> None:
    running = start_service(step_s=0.001)
    client.wait_ready()
    client.telemetry(Heartbeat)
    client.send(submit("a", max_tokens=ENDLESS))
    client.receive(Tokens)
    assert client.ask(Control(action="shutdown", tag=9), Done).tag == 9
    assert client.receive(Finished).finish_reason == "abort"
    assert client.telemetry(Goodbye).reason == ""
    running.join()
    assert running.error is None
    assert running.engine.closed


@contextmanager
def step_in_progress(running: Running, client: Client) -> Iterator[None]:
    """While a step is in progress, what clients send waits."""
    running.engine.may_step.clear()
    client.ask(submit("step", max_tokens=1), Accepted)
    while not running.engine.step_started_ns:
        time.sleep(0.001)
    yield
    running.engine.may_step.set()


def test_commands_above_the_limit_are_refused(
    start_service: Callable[..., Running], client: Client, new_client: Callable[[], Client]
) -> None:
    running = start_service(limits=ServiceLimits(client_commands=Bound(50, MIB), all_commands=Bound(60, MIB)))
    client.wait_ready()
    other = new_client()
    other.wait_ready()
    with step_in_progress(running, client):
        for tag in range(55):
            client.send(GetBlockText(blocks=(0,), tag=tag))
        reason = client.receive(Failed).reason
        assert "50 commands wait already" in reason
        assert "limit of 50 for a client" in reason
        for tag in range(15):
            other.send(GetBlockText(blocks=(0,), tag=tag))
        assert "limit of 60 for all clients" in other.receive(Failed).reason
    answered = {client.receive(BlockText).tag for _ in range(50)}
    assert answered == set(range(50))
    assert {other.receive(BlockText).tag for _ in range(10)} == set(range(10))


def test_long_prompts_above_the_byte_limit_are_refused(start_service: Callable[..., Running], client: Client) -> None:
    limits = ServiceLimits(client_commands=Bound(100, 1_300_000))
    running = start_service(limits=limits)
    client.wait_ready()
    with step_in_progress(running, client):
        for number in range(5):
            client.send(submit(f"long{number}", "x" * 400_000, max_tokens=1))
        refused = [client.receive(Refused) for _ in range(2)]
    assert {refusal.request_id for refusal in refused} == {"long3", "long4"}
    assert all("beyond the limit of 1300000 for a client" in refusal.reason for refusal in refused)
    ends = {client.receive(Finished).request_id for _ in range(4)}
    assert ends == {"step", "long0", "long1", "long2"}
    client.run(submit("again", "x" * 400_000, max_tokens=1))


def test_empty_chat_messages_count_with_their_memory_against_the_command_limit(
    start_service: Callable[..., Running], client: Client
) -> None:
    running = start_service(limits=ServiceLimits(client_commands=Bound(100, MIB)))
    client.wait_ready()
    empty = (ChatMessage(role="user", content=""),) * 4_000
    with step_in_progress(running, client):
        for number in range(3):
            client.send(Submit(request_id=f"r{number}", messages=empty))
        assert [client.receive(Refused).request_id for _ in range(2)] == ["r1", "r2"]


def test_too_many_messages_are_refused_with_the_request_id(
    start_service: Callable[..., Running], client: Client
) -> None:
    start_service()
    client.wait_ready()
    client.send(Submit(request_id="many", messages=(ChatMessage(role="user", content=""),) * 5_000))
    refused = client.receive(Refused)
    assert (refused.request_id, "4096" in refused.reason) == ("many", True)


def test_open_requests_are_limited_per_client_and_in_total(
    start_service: Callable[..., Running], client: Client, new_client: Callable[[], Client]
) -> None:
    start_service(step_s=0.001, limits=ServiceLimits(client_requests=Bound(4, MIB), all_requests=Bound(6, MIB)))
    client.wait_ready()
    other = new_client()
    client.ask(submit("a", n=3, max_tokens=ENDLESS), Accepted)
    assert "3 requests are open already" in client.ask(submit("b", n=2, max_tokens=1), Refused).reason
    other.ask(submit("c", n=3, max_tokens=ENDLESS), Accepted)
    assert "limit of 6 for all clients" in client.ask(submit("b", max_tokens=1), Refused).reason
    client.ask(Abort(request_id="a"), Done)
    for _ in range(3):
        client.receive(Finished)
    assert client.run(submit("b", n=1, max_tokens=1))[1].finish_reason == "length"


# Clients share the time, not the number of commands.


def num_block_texts_received(client: Client) -> int:
    """Return how many block texts the client has received so far."""
    while client.dealer.poll(0):
        client.receive(object)
    return sum(isinstance(reply, BlockText) for reply in client.replies)


def test_flood_of_one_client_delays_neither_steps_nor_other_clients(
    start_service: Callable[..., Running], client: Client, new_client: Callable[[], Client]
) -> None:
    running = start_service(step_s=0.002, block_s=0.001)  # each of the many commands takes 0.1 s
    client.wait_ready()
    flood = new_client()
    flood.wait_ready()
    client.ask(submit("a", max_tokens=ENDLESS), Accepted)
    for tag in range(200):
        flood.send(GetBlockText(blocks=(0,) * 100, tag=tag))
    flood.receive(BlockText)
    step = running.engine.step_count
    client.ask(GetBlockText(blocks=(1,), tag=7), BlockText)
    assert num_block_texts_received(flood) < 150, "the commands of the other client were not delayed"
    client.run(submit("b", max_tokens=3))
    assert running.engine.step_count > step + 3
    flood.send(Control(action="shutdown", tag=1))


def test_steps_go_on_while_one_command_reads_many_blocks(start_service: Callable[..., Running], client: Client) -> None:
    running = start_service(step_s=0.002, block_s=0.001)
    client.wait_ready()
    client.ask(submit("a", max_tokens=ENDLESS), Accepted)
    client.receive(Tokens)
    step = running.engine.step_count
    answer = client.ask(GetBlockText(blocks=tuple(range(20)) * 32, tag=1), BlockText)
    assert [content.block for content in answer.contents] == list(range(20)) * 32
    assert running.engine.step_count >= step + 10, "the blocks are not read in slices with a step after each"


def test_shutdown_is_answered_at_once_despite_waiting_commands(
    start_service: Callable[..., Running], client: Client, new_client: Callable[[], Client]
) -> None:
    running = start_service(step_s=0.002, block_s=0.001)
    client.wait_ready()
    flood = new_client()
    client.ask(submit("a", max_tokens=ENDLESS), Accepted)
    for tag in range(500):
        flood.send(GetBlockText(blocks=(0,) * 100, tag=tag))
    flood.receive(BlockText)
    running.service.stop()
    assert client.receive(Finished).finish_reason == "abort"
    running.join()
    assert "it was stopped" in flood.receive(Failed).reason
    assert num_block_texts_received(flood) < 400, "the waiting commands were executed first"


def test_long_prompt_delays_neither_steps_nor_other_clients(
    start_service: Callable[..., Running], client: Client, new_client: Callable[[], Client]
) -> None:
    running = start_service(step_s=0.001, prompt_s=1.0)
    client.wait_ready()
    slow = new_client()
    client.ask(submit("a", max_tokens=ENDLESS), Accepted)
    slow.send(submit("first", "slow" + "x" * 100_000, max_tokens=1))
    slow.send(submit("second", max_tokens=1))
    step = running.engine.step_count
    assert client.run(submit("b", max_tokens=3))[1].finish_reason == "length"
    assert slow.receive(Accepted).request_id == "first", "the order of a client's commands is not kept"
    assert slow.receive(Accepted).request_id == "second"
    assert running.engine.step_count > step + 3


def test_request_can_be_aborted_while_its_prompt_is_prepared(
    start_service: Callable[..., Running], client: Client
) -> None:
    running = start_service(prompt_s=1.5)
    client.wait_ready()
    client.send(submit("a", "slow", n=2, max_tokens=1))
    client.send(submit("waiting", max_tokens=1))
    client.send(Abort(request_id="waiting"))  # while it waits behind the other request
    client.send(Abort(request_id="a"))
    ends = [client.receive(Finished) for _ in range(3)]
    assert sorted((end.request_id, end.index, end.finish_reason) for end in ends) == [
        ("a", 0, "abort"),
        ("a", 1, "abort"),
        ("waiting", 0, "abort"),
    ]
    assert sorted(running.engine.listed) == ["a", "waiting"], "what was sent is listed"
    client.run(submit("a", max_tokens=1))
    assert running.engine.step_count == 1
    assert not any(isinstance(reply, Accepted) and reply.request_id == "waiting" for reply in client.replies)


def test_abort_is_served_before_the_waiting_submission_of_the_same_client(
    start_service: Callable[..., Running], client: Client, new_client: Callable[[], Client]
) -> None:
    """An abort does not wait for the submissions of its client that are still in the queue."""
    running = start_service()
    client.wait_ready()
    blocker = new_client()
    running.engine.may_step.clear()
    blocker.ask(submit("blocks", max_tokens=1), Accepted)
    wait_for(lambda: bool(running.engine.step_started_ns))
    client.send(msgspec.structs.replace(submit("late", max_tokens=ENDLESS), client="somebody", batch="one"))
    client.send(Abort(request_id="late"))
    client.ask(GetStatus(), Status)
    running.engine.may_step.set()
    assert client.receive(Finished).finish_reason == "abort"
    client.receive(Done)
    assert running.engine.listed == ["late"]
    assert client.run(submit("late", max_tokens=1))[1].finish_reason == "length", "the request id is still in use"


def test_requests_of_a_client_that_left_during_preparation_are_dropped(
    start_service: Callable[..., Running], client: Client, new_client: Callable[[], Client]
) -> None:
    running = start_service(step_s=0.002, prompt_s=10)
    client.wait_ready()
    leaver = new_client()
    leaver.ask(
        submit("streams", max_tokens=ENDLESS), Accepted
    )  # a client that left is noticed when something is sent to it
    leaver.send(submit("first", "slow", max_tokens=1))
    leaver.send(submit("second", max_tokens=1))
    leaver.ask(GetBlockText(blocks=(0,), tag=1), BlockText)  # both are being read
    leaver.close()
    wait_for(lambda: len(running.engine.listed) == 2)
    assert sorted(running.engine.listed) == ["first", "second"]


def test_request_id_is_in_use_while_its_prompt_is_prepared(
    start_service: Callable[..., Running], client: Client
) -> None:
    start_service(prompt_s=1.5)
    client.wait_ready()
    client.send(submit("a", "slow", max_tokens=1))
    assert "in use" in client.ask(submit("a", max_tokens=1), Refused).reason
    assert client.receive(Finished).finish_reason == "length"


def test_prompt_still_in_preparation_at_the_end_is_refused(
    start_service: Callable[..., Running], client: Client
) -> None:
    running = start_service(prompt_s=1.5)
    client.wait_ready()
    client.send(submit("a", "slow", max_tokens=1))
    client.ask(GetBlockText(blocks=(0,)), BlockText)
    running.service.stop()
    assert "it was stopped" in client.receive(Refused).reason
    running.join()


# Snapshots


def test_clients_that_ask_during_one_step_share_a_snapshot(
    start_service: Callable[..., Running], new_client: Callable[[], Client]
) -> None:
    running = start_service()
    clients = [new_client() for _ in range(10)]
    for client in clients:
        client.wait_ready()
    with step_in_progress(running, clients[0]):
        for client in clients:
            client.send(GetBlockText(blocks=(0,)))
            client.send(GetSnapshot(tag=3))
            client.send(GetBlockText(blocks=(0,)))
            client.ask(GetStatus(), Status)  # answered by the service itself: what was sent before it still waits
    assert {client.receive(Snapshot).seq for client in clients} == {running.engine.last_seq}
    assert running.engine.num_snapshots == 1


def test_repeated_snapshots_are_packed_at_a_limited_rate(start_service: Callable[..., Running], client: Client) -> None:
    """Each step makes the last snapshot outdated, but packing may take at most a fifth of the time."""
    running = start_service(step_s=0.002, pack_s=0.02)
    client.wait_ready()
    client.ask(submit("a", max_tokens=ENDLESS), Accepted)
    step = running.engine.step_count
    for tag in range(20):
        assert client.ask(GetSnapshot(tag=tag), Snapshot).tag == tag
    assert running.engine.step_count > step + 20


def test_waiting_snapshot_is_sent_when_the_engine_is_paused(
    start_service: Callable[..., Running], client: Client
) -> None:
    start_service(step_s=0.002, pack_s=0.3)
    client.wait_ready()
    client.ask(submit("a", max_tokens=ENDLESS), Accepted)
    client.ask(GetSnapshot(tag=1), Snapshot)
    client.receive(Tokens)
    client.send(GetSnapshot(tag=2))
    client.send(Control(action="pause", tag=3))
    assert client.receive(Snapshot).tag == 2


def test_every_snapshot_request_is_answered_or_refused(start_service: Callable[..., Running], client: Client) -> None:
    start_service(step_s=0.002, pack_s=0.2, limits=ServiceLimits(client_snapshots=10))
    client.wait_ready()
    client.ask(submit("a", max_tokens=ENDLESS), Accepted)
    for tag in range(100):
        client.send(GetSnapshot(tag=tag))
    answers = [client.receive((Snapshot, Failed)) for _ in range(100)]
    assert {answer.tag for answer in answers} == set(range(100))
    assert any(isinstance(answer, Failed) and "at most 10" in answer.reason for answer in answers)


# The model loads, and failures.


def test_status_has_the_adapters_as_soon_as_the_engine_is_ready(folder: Path, fake: ModuleType) -> None:
    """Otherwise, a client that connects at that moment would be refused an adapter that exists."""
    statuses = []
    build = fake.builder(fake.FakeEngineOptions())

    def on_ready(hello: object) -> None:
        statuses.append(service.receiver.status(tag=0))
        service.stop()

    service = EngineService(f"ipc://{folder}", build, on_ready=on_ready)
    service.run()
    assert [(status.phase, status.takes_adapters) for status in statuses] == [("ready", True)]


def test_status_shows_loading_and_requests_are_refused_until_the_model_is_loaded(
    start_service: Callable[..., Running], client: Client
) -> None:
    may_load = threading.Event()
    start_service(load_s=60, may_load=may_load.is_set)
    status = client.ask(GetStatus(tag=1), Status)
    assert (status.phase, status.hello) == ("loading", None)
    assert "still loading" in client.ask(submit("early"), Refused).reason
    assert "still loading" in client.ask(GetSnapshot(tag=2), Failed).reason
    assert client.ask(Abort(request_id="early"), Done).request_id == "early"
    may_load.set()
    assert client.wait_ready().phase == "ready"
    status = client.ask(GetStatus(), Status)
    assert status.progress is not None
    assert (status.progress.stage, status.progress.done, status.progress.total) == ("load", 1, 4)


@pytest.fixture
def failure_was_received(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that is set once a client has received the reason of the failure: until then the service stays up."""
    event = threading.Event()
    clock = SimpleNamespace(
        monotonic=time.monotonic, monotonic_ns=time.monotonic_ns, sleep=lambda seconds: event.wait(60)
    )
    monkeypatch.setattr("kvscope_engine.server.service.time", clock)
    yield event
    event.set()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bad input", "model 'fake' is not accepted: it is not real"),
        ("no memory", "there is no memory left: 1 byte of 2 is free"),
        ("bug", "ZeroDivisionError: division by zero"),
    ],
)
def test_failed_load_is_reported_to_clients_that_ask(
    start_service: Callable[..., Running], client: Client, failure_was_received: threading.Event, kind: str, reason: str
) -> None:
    may_load = threading.Event()
    running = start_service(load_s=60, load_error=kind, may_load=may_load.is_set)
    client.telemetry(Progress)
    client.ask(GetStatus(), Status)
    may_load.set()
    status = client.wait_ready()
    assert (status.phase, status.reason) == ("failed", reason)
    assert reason in client.ask(submit("late"), Refused).reason
    failure_was_received.set()
    assert client.telemetry(Goodbye).reason == reason
    running.join()
    assert running.error is not None


def test_failed_forward_pass_ends_every_request_with_its_reason(
    start_service: Callable[..., Running],
    client: Client,
    new_client: Callable[[], Client],
    failure_was_received: threading.Event,
) -> None:
    running = start_service(step_s=0.01, fail_at_step=10)
    other = new_client()
    for each in (client, other):
        each.wait_ready()
    client.telemetry(Heartbeat)
    other.send(submit("theirs", n=2, max_tokens=ENDLESS))
    for name in "abc":
        client.send(submit(name, max_tokens=ENDLESS))
    ends = [client.receive(Finished) for _ in "abc"]
    ends += [other.receive(Finished) for _ in range(2)]
    reason = "the engine died in a step: RuntimeError: evil forward"
    assert {(end.finish_reason, end.error) for end in ends} == {("error", reason)}
    assert all(end.usage.prompt_tokens == 5 for end in ends)
    said = sum(len(reply.token_ids) for reply in client.replies if isinstance(reply, Tokens))
    assert sum(end.usage.completion_tokens for end in ends[:3]) == said > 0
    assert client.telemetry(Goodbye).reason == reason
    assert reason in client.ask(submit("later"), Refused).reason
    failure_was_received.set()
    running.join()
    assert isinstance(running.error, EngineDead)
    assert running.engine.closed


def test_engine_that_failed_outside_a_step_ends_with_its_reason(
    start_service: Callable[..., Running], client: Client, failure_was_received: threading.Event
) -> None:
    """This also holds without work, when the service is stopped without a reason."""
    running = start_service(step_s=0.01)
    client.wait_ready()
    client.telemetry(Heartbeat)
    running.engine.failure = "rank 1 of 2 is gone"
    running.service.stop()
    assert client.telemetry(Goodbye).reason == "rank 1 of 2 is gone"
    assert "rank 1 of 2 is gone" in client.ask(submit("later"), Refused).reason
    failure_was_received.set()
    running.join()
    assert isinstance(running.error, EngineDead)


def test_failed_command_ends_the_engine_only_if_it_cannot_continue(
    start_service: Callable[..., Running],
    client: Client,
    failure_was_received: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = start_service(step_s=0.01)
    client.wait_ready()
    client.telemetry(Heartbeat)
    client.send(submit("a", max_tokens=2000))
    client.receive(Accepted)

    def fails(*given: Any) -> str:
        raise MemoryError("no memory for a copy")

    monkeypatch.setattr(running.engine.interventions, "evict", fails)
    assert "no memory for a copy" in client.ask(Evict(tag=1, blocks=(2,)), Failed).reason
    assert client.receive(Tokens).request_id == "a"
    running.engine.failure = "blocks could not be copied"
    assert "no memory for a copy" in client.ask(Evict(tag=2, blocks=(2,)), Failed).reason
    end = client.receive(Finished)
    assert (end.finish_reason, end.error) == ("error", "blocks could not be copied")
    assert client.telemetry(Goodbye).reason == "blocks could not be copied"
    failure_was_received.set()
    running.join()
    assert isinstance(running.error, EngineDead)


# What it tells by itself


def test_working_engine_publishes_frames_heartbeats_and_gpu_samples(
    start_service: Callable[..., Running], client: Client
) -> None:
    running = start_service(step_s=0.002)
    client.wait_ready()
    client.send(submit("a", max_tokens=ENDLESS))
    client.telemetry(Frame)
    beat = client.telemetry(Heartbeat, lambda beat: beat.num_unfinished == 1)
    assert 0 < beat.seq <= running.engine.last_seq
    assert 0 < beat.step <= running.engine.step_count
    sample = client.telemetry(DeviceSample, lambda sample: sample.utilization >= 0)  # the first knows no time before it
    assert sample.memory_total_bytes > sample.memory_used_bytes > sample.process_bytes > 0
    assert sample.utilization <= 1.0
    assert sample.power_watts == sample.temperature_celsius == -1.0


def test_memory_breakdown_is_published_without_a_request(start_service: Callable[..., Running], client: Client) -> None:
    may_load = threading.Event()
    start_service(load_s=60, may_load=may_load.is_set)
    client.telemetry(Progress)
    may_load.set()
    assert client.telemetry(MemoryBreakdown).kv_bytes == 2
