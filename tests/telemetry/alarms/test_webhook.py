"""Webhook posts to a real server: payload, retries, and that the posting thread never waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from tests.telemetry.alarms.receiver import WebhookReceiver, open_receiver

from kvscope_telemetry.alarms import webhook as webhook_module
from kvscope_telemetry.alarms.alarm_engine import Alarm
from kvscope_telemetry.alarms.rules import parse_rule
from kvscope_telemetry.alarms.webhook import MAX_QUEUED, Webhook, checked_url, payload
from kvscope_telemetry.errors import BadInput

WAIT_S = 120.0
RULE = parse_rule("Slow: ttft_p99_ms > 500 for 10 s")
BEGIN_NS = 1_700_000_000_500_000_000


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with open_receiver() as made:
        yield made


@pytest.fixture
def short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry failed posts almost immediately."""
    monkeypatch.setattr(webhook_module, "RETRY_AFTER_S", (0.01, 0.01))


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.005)


def test_webhook_receives_state_and_values_when_an_alarm_starts_and_ends(receiver: WebhookReceiver) -> None:
    hook = Webhook(receiver.url)
    alarm = Alarm(RULE, 7, BEGIN_NS, BEGIN_NS + 10_000_000_000, worst=802.0, value=731.0)
    assert hook.post(payload(alarm, "vllm", "vllm://gpu:8000"))
    over = Alarm(RULE, 7, BEGIN_NS, BEGIN_NS + 10_000_000_000, 802.0, float("nan"), BEGIN_NS + 60_000_000_000)
    assert hook.post(payload(over, "vllm", "vllm://gpu:8000"))
    hook.close(WAIT_S)
    first, last = receiver.posts
    assert first == {
        "name": "Slow",
        "expression": "ttft_p99_ms > 500",
        "for_s": 10.0,
        "state": "firing",
        "value": 731.0,
        "worst": 802.0,
        "summary": "Slow: up to 802 ms",
        "time": "2023-11-14T22:13:30.500Z",
        "startsAt": "2023-11-14T22:13:20.500Z",
        "endsAt": None,
        "engine": "vllm",
        "instance": "vllm://gpu:8000",
        "fingerprint": first["fingerprint"],
    }
    assert (last["state"], last["value"], last["endsAt"]) == ("resolved", None, "2023-11-14T22:14:20.500Z")
    assert last["time"] == last["endsAt"]
    assert last["fingerprint"] == first["fingerprint"]
    assert receiver.heads[0]["Content-Type"] == "application/json"
    assert receiver.heads[0]["path"] == "/hook?token=x"


@pytest.mark.usefixtures("short_retries")
def test_failed_post_is_tried_three_times(receiver: WebhookReceiver) -> None:
    receiver.answers = [503, 500]
    hook = Webhook(receiver.url)
    hook.post({"number": 1})
    wait_for(lambda: len(receiver.posts) == 3)
    hook.close(WAIT_S)
    assert [post["number"] for post in receiver.posts] == [1, 1, 1]
    assert hook.failure == ""


@pytest.mark.usefixtures("short_retries")
def test_undeliverable_post_is_dropped_and_the_next_one_is_sent(receiver: WebhookReceiver) -> None:
    receiver.answers = [503, 503, 503]
    hook = Webhook(receiver.url)
    hook.post({"number": 1})
    wait_for(lambda: hook.failure)
    assert hook.failure == f"webhook at {receiver.url.split('/')[2]}: it answered 503 Service Unavailable"
    hook.post({"number": 2})
    wait_for(lambda: not hook.failure)
    hook.close(WAIT_S)
    assert [post["number"] for post in receiver.posts] == [1, 1, 1, 2]


@pytest.mark.usefixtures("short_retries")
def test_redirect_counts_as_a_failure(receiver: WebhookReceiver) -> None:
    receiver.answers = [302, 302, 302]
    hook = Webhook(receiver.url)
    hook.post({})
    wait_for(lambda: "it answered 302" in hook.failure)
    hook.close(WAIT_S)
    assert {head["path"] for head in receiver.heads} == {"/hook?token=x"}


@pytest.mark.usefixtures("short_retries")
def test_post_never_blocks_and_a_full_queue_drops_posts(receiver: WebhookReceiver) -> None:
    """The server answers no request meanwhile."""
    receiver.may_answer.clear()
    hook = Webhook(receiver.url)
    taken = [hook.post({"number": number}) for number in range(MAX_QUEUED + 50)]
    assert receiver.may_answer.is_set() is False, "the server answered a request meanwhile"
    assert MAX_QUEUED <= sum(taken) <= MAX_QUEUED + 1
    assert not taken[-1]
    assert "more are dropped" in hook.failure
    receiver.may_answer.set()
    hook.close(WAIT_S)
    numbers = [post["number"] for post in receiver.posts]
    assert numbers == list(range(sum(taken)))


def test_refused_connection_is_reported_without_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_module, "RETRY_AFTER_S", (0.01, 0.01))
    hook = Webhook("http://127.0.0.1:9/secret")
    hook.post({})
    wait_for(lambda: hook.failure)
    hook.close(WAIT_S)
    assert hook.failure == "webhook at 127.0.0.1:9: Connection refused"


def test_close_does_not_wait_for_a_retry() -> None:
    """The pauses between retries are seconds here."""
    hook = Webhook("http://127.0.0.1:9/x")
    hook.post({})
    hook.close(WAIT_S)
    assert hook.failure
    assert not hook.post({})


@pytest.mark.parametrize("url", ["http://host", " https://host:8443/a?b=c#d ", "http://[::1]:80/x"])
def test_valid_webhook_url_is_accepted(url: str) -> None:
    assert checked_url(url) == url.strip()


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/x",
        "file:///etc/passwd",
        "host/x",
        "",
        "http://",
        "http://host:99999/",
        "http://a b/",
        "http://h/\nx",
        "http://user:word@host/",
        "javascript:alert(1)",
        "http://höst/",
    ],
)
def test_invalid_webhook_url_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match="is not accepted: http://HOST/"):
        checked_url(url)
