"""Prompts that are being made into tokens are bounded, in number and in bytes, for a client and for all."""

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


class Site:
    """A preparation that stands still until it may go on."""

    def __init__(self, limits: ServiceLimits) -> None:
        self.may_go_on = threading.Event()
        self.quick: set[Structured | None] = set()
        """Forms that are made at once; None stands for none."""
        self.known: set[Structured | None] = {None}
        """Those that are made already."""
        self.begun: list[str] = []
        self.wanted: list[bool] = []
        self.done: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
        self.preparation = Preparation(self._token_ids, self._has_form, self.done.put, limits)

    def put(self, client: bytes, submit: Submit) -> tuple[Prepared, str]:
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
def start() -> Iterator[Callable[[ServiceLimits], Site]]:
    sites: list[Site] = []

    def make(limits: ServiceLimits) -> Site:
        sites.append(Site(limits))
        return sites[-1]

    yield make
    for site in sites:
        site.may_go_on.set()
        site.preparation.close()


def test_their_number_is_bounded_and_counts_no_longer_when_they_are_through(start: Callable[..., Site]) -> None:
    site = start(ServiceLimits(client_prompts=Bound(2, MIB), all_prompts=Bound(3, MIB)))
    submit = Submit(request_id="r", prompt="hello")
    assert [site.put(b"a", submit)[1] for _ in range(2)] == ["", ""]
    assert "2 prompts are being prepared already" in site.put(b"a", submit)[1]
    assert site.put(b"b", submit)[1] == ""
    assert "limit of 3 for all clients" in site.put(b"b", submit)[1]
    site.may_go_on.set()
    assert sorted(site.done.get(timeout=WAIT_S).client for _ in range(3)) == [b"a", b"a", b"b"]
    deadline = time.monotonic() + WAIT_S
    while site.put(b"a", submit)[1]:
        assert time.monotonic() < deadline, "they count for ever"


def test_what_is_cancelled_before_it_began_makes_room(start: Callable[..., Site]) -> None:
    site = start(ServiceLimits(client_prompts=Bound(2, MIB)))
    submit = Submit(request_id="r", prompt="hello")
    site.put(b"a", submit)
    waiting, _ = site.put(b"a", submit)  # a client's own are prepared one at a time
    assert site.put(b"a", submit)[1]
    site.preparation.cancel(waiting)
    assert site.put(b"a", submit)[1] == ""


def test_empty_turns_weigh_what_they_take(start: Callable[..., Site]) -> None:
    site = start(ServiceLimits(client_prompts=Bound(100, MIB)))
    reasons = [site.put(b"a", Submit(request_id="r", messages=EMPTY_TURNS))[1] for _ in range(2)]
    assert reasons[0] == ""
    assert f"beyond the limit of {MIB} for a client" in reasons[1]


def formed(form: Structured | None, name: str = "r") -> Submit:
    return Submit(request_id=name, prompt="hello", sampling=SamplingParams(structured=form))


def test_a_client_has_two_new_forms_at_a_time_and_the_next_client_comes_before_its_others(
    start: Callable[..., Site],
) -> None:
    site = start(ServiceLimits())
    greedy = [
        site.put(b"a", formed(Structured(kind="regex", text=str(number)), f"a{number}"))[0] for number in range(9)
    ]
    wait_for(lambda: sorted(site.begun) == ["a0", "a1"])
    known = Structured(kind="regex", text="known")
    site.known.add(known)
    site.quick |= {None, known}
    prompt, at_hand = site.put(b"a", formed(None))[0], site.put(b"a", formed(known))[0]
    assert {site.done.get(timeout=WAIT_S), site.done.get(timeout=WAIT_S)} == {prompt, at_hand}
    for number in range(2):
        site.put(b"b", formed(Structured(kind="regex", text=f"b{number}"), f"b{number}"))
    wait_for(lambda: {"b0", "b1"} <= set(site.begun))
    site.put(b"c", formed(Structured(kind="regex", text="c"), "c"))
    site.preparation.cancel(greedy[0])
    wait_for(lambda: "c" in site.begun)
    assert "a2" not in site.begun


def test_what_nobody_wants_any_more_is_told_so_in_the_middle(start: Callable[..., Site]) -> None:
    site = start(ServiceLimits())
    prepared, _ = site.put(b"a", formed(Structured(kind="json_object")))
    wait_for(lambda: bool(site.begun))
    site.preparation.cancel(prepared)
    wait_for(lambda: site.wanted == [False])


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_form_that_takes_long_holds_up_neither_prompts_nor_other_forms(start: Callable[..., Site]) -> None:
    site = start(ServiceLimits())
    slow, quick = (Structured(kind="regex", text=text) for text in ("slow", "quick"))
    site.quick |= {None, quick}
    stuck = [site.put(b"a", formed(slow))[0] for _ in range(2)]
    others = [site.put(b"a", formed(form))[0] for form in (None, quick, None, quick)]
    assert {id(site.done.get(timeout=WAIT_S)) for _ in others} == set(map(id, others))
    site.may_go_on.set()
    assert [site.done.get(timeout=WAIT_S) for _ in stuck] == stuck, "of one form they are done in their order"


def test_those_of_a_connection_that_comes_back_move_with_it(start: Callable[..., Site]) -> None:
    site = start(ServiceLimits())
    form = Structured(kind="json_object")
    all_of_them = [site.put(b"before", formed(kind))[0] for kind in (form, None, form, None)]
    all_of_them += [site.put(b"after", formed(form))[0]]
    site.preparation.move(b"before", b"after")
    assert {prepared.client for prepared in all_of_them} == {b"after"}
    site.may_go_on.set()
    assert {id(site.done.get(timeout=WAIT_S)) for _ in all_of_them} == set(map(id, all_of_them))
