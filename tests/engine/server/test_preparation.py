"""Prompts that are being tokenized are bounded in number and bytes, per client and in total."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvscope_engine.server.preparation import Preparation, Prepared
from kvscope_engine.server.service_limits import MIB, Bound, ServiceLimits
from kvscope_telemetry.messages.commands import ChatMessage, Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.structured import Structured

WAIT_S = 60.0
EMPTY_TURNS = (ChatMessage(role="user", content=""),) * 4_000


class PausedPreparation:
    """A preparation that pauses until the test lets it continue."""

    def __init__(self, limits: ServiceLimits) -> None:
        self.may_go_on = threading.Event()
        self.quick: set[Structured | None] = set()
        """Grammars that are compiled immediately; None stands for no grammar."""
        self.known: set[Structured | None] = {None}
        """Grammars that were compiled before."""
        self.begun: list[str] = []
        self.wanted: list[bool] = []
        self.done: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
        self.preparation = Preparation(self._token_ids, self._has_form, self.done.put, limits)

    def enqueue_submit(self, client: bytes, submit: Submit) -> tuple[Prepared, str]:
        prepared = Prepared(client, submit)
        return prepared, self.preparation.enqueue(prepared)

    def _has_form(self, submit: Submit) -> bool:
        return submit.sampling.structured in self.known

    def _token_ids(self, submit: Submit, is_wanted: Callable[[], bool]) -> list[int]:
        self.begun.append(submit.request_id)
        if submit.sampling.structured not in self.quick:
            while is_wanted() and not self.may_go_on.wait(0.01):
                pass
        self.wanted.append(is_wanted())
        return [1, 2]


@pytest.fixture
def start_preparation() -> Iterator[Callable[[ServiceLimits], PausedPreparation]]:
    sites: list[PausedPreparation] = []

    def make(limits: ServiceLimits) -> PausedPreparation:
        sites.append(PausedPreparation(limits))
        return sites[-1]

    yield make
    for site in sites:
        site.may_go_on.set()
        site.preparation.close()


def test_number_of_prompts_being_tokenized_is_bounded_per_client_and_in_total(
    start_preparation: Callable[..., PausedPreparation],
) -> None:
    site = start_preparation(ServiceLimits(client_prompts=Bound(2, MIB), all_prompts=Bound(3, MIB)))
    submit = Submit(request_id="r", prompt="hello")
    assert [site.enqueue_submit(b"a", submit)[1] for _ in range(2)] == ["", ""]
    assert "2 prompts are being prepared already" in site.enqueue_submit(b"a", submit)[1]
    assert site.enqueue_submit(b"b", submit)[1] == ""
    assert "limit of 3 for all clients" in site.enqueue_submit(b"b", submit)[1]
    site.may_go_on.set()
    assert sorted(site.done.get(timeout=WAIT_S).client for _ in range(3)) == [b"a", b"a", b"b"]
    deadline = time.monotonic() + WAIT_S
    while site.enqueue_submit(b"a", submit)[1]:
        assert time.monotonic() < deadline, "finished prompts must not count"


def test_cancelled_prompt_no_longer_counts(start_preparation: Callable[..., PausedPreparation]) -> None:
    site = start_preparation(ServiceLimits(client_prompts=Bound(2, MIB)))
    submit = Submit(request_id="r", prompt="hello")
    site.enqueue_submit(b"a", submit)
    waiting, _ = site.enqueue_submit(b"a", submit)  # the prompts of one client are prepared one at a time
    assert site.enqueue_submit(b"a", submit)[1]
    site.preparation.cancel(waiting)
    assert site.enqueue_submit(b"a", submit)[1] == ""


def test_empty_chat_messages_count_with_their_memory_against_the_prompt_limit(
    start_preparation: Callable[..., PausedPreparation],
) -> None:
    site = start_preparation(ServiceLimits(client_prompts=Bound(100, MIB)))
    reasons = [site.enqueue_submit(b"a", Submit(request_id="r", messages=EMPTY_TURNS))[1] for _ in range(2)]
    assert reasons[0] == ""
    assert f"beyond the limit of {MIB} for a client" in reasons[1]


def submit_with_grammar(form: Structured | None, name: str = "r") -> Submit:
    return Submit(request_id=name, prompt="hello", sampling=SamplingParams(structured=form))


def test_client_compiles_two_grammars_at_a_time_and_other_clients_come_next(
    start_preparation: Callable[..., PausedPreparation],
) -> None:
    site = start_preparation(ServiceLimits())
    greedy = [
        site.enqueue_submit(b"a", submit_with_grammar(Structured(kind="regex", text=str(number)), f"a{number}"))[0]
        for number in range(9)
    ]
    wait_for(lambda: sorted(site.begun) == ["a0", "a1"])
    known = Structured(kind="regex", text="known")
    site.known.add(known)
    site.quick |= {None, known}
    prompt, at_hand = (
        site.enqueue_submit(b"a", submit_with_grammar(None))[0],
        site.enqueue_submit(b"a", submit_with_grammar(known))[0],
    )
    assert {site.done.get(timeout=WAIT_S), site.done.get(timeout=WAIT_S)} == {prompt, at_hand}
    for number in range(2):
        site.enqueue_submit(b"b", submit_with_grammar(Structured(kind="regex", text=f"b{number}"), f"b{number}"))
    wait_for(lambda: {"b0", "b1"} <= set(site.begun))
    site.enqueue_submit(b"c", submit_with_grammar(Structured(kind="regex", text="c"), "c"))
    site.preparation.cancel(greedy[0])
    wait_for(lambda: "c" in site.begun)
    assert "a2" not in site.begun


def test_grammar_being_compiled_learns_that_its_request_was_cancelled(
    start_preparation: Callable[..., PausedPreparation],
) -> None:
    site = start_preparation(ServiceLimits())
    prepared, _ = site.enqueue_submit(b"a", submit_with_grammar(Structured(kind="json_object")))
    wait_for(lambda: bool(site.begun))
    site.preparation.cancel(prepared)
    wait_for(lambda: site.wanted == [False])


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_slow_grammar_delays_neither_prompts_nor_other_grammars(
    start_preparation: Callable[..., PausedPreparation],
) -> None:
    site = start_preparation(ServiceLimits())
    slow, quick = (Structured(kind="regex", text=text) for text in ("slow", "quick"))
    site.quick |= {None, quick}
    stuck = [site.enqueue_submit(b"a", submit_with_grammar(slow))[0] for _ in range(2)]
    others = [site.enqueue_submit(b"a", submit_with_grammar(form))[0] for form in (None, quick, None, quick)]
    assert {id(site.done.get(timeout=WAIT_S)) for _ in others} == set(map(id, others))
    site.may_go_on.set()
    assert [site.done.get(timeout=WAIT_S) for _ in stuck] == stuck, "requests with one grammar must finish in order"


def test_prompts_being_tokenized_move_to_the_new_connection_of_their_client(
    start_preparation: Callable[..., PausedPreparation],
) -> None:
    site = start_preparation(ServiceLimits())
    form = Structured(kind="json_object")
    all_of_them = [site.enqueue_submit(b"before", submit_with_grammar(kind))[0] for kind in (form, None, form, None)]
    all_of_them += [site.enqueue_submit(b"after", submit_with_grammar(form))[0]]
    site.preparation.move(b"before", b"after")
    assert {prepared.client for prepared in all_of_them} == {b"after"}
    site.may_go_on.set()
    assert {id(site.done.get(timeout=WAIT_S)) for _ in all_of_them} == set(map(id, all_of_them))
