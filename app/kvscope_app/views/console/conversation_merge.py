"""Two windows changed the same conversation: which messages stand, so that no word is lost. No Qt."""

from __future__ import annotations

from collections.abc import Sequence

from kvscope_app.views.console.conversation import Conversation, Message


def goes_on_from(later: Conversation, earlier: Conversation) -> bool:
    """Whether `later` holds every word of `earlier`: the same messages, the last one perhaps longer, and more."""
    return _covers(later.messages, earlier.messages)


def take_over(ours: Conversation, theirs: Conversation) -> None:
    """Become `theirs`. Messages that are the same stay the same objects: what shows them need not draw them anew."""
    same = 0
    while same < min(len(ours.messages), len(theirs.messages)) and ours.messages[same] == theirs.messages[same]:
        same += 1
    ours.messages[same:] = theirs.messages[same:]
    ours.title, ours.named = theirs.title, theirs.named
    ours.system, ours.sampling = theirs.system, theirs.sampling
    ours.changed_s = theirs.changed_s


def _covers(later: Sequence[Message], earlier: Sequence[Message]) -> bool:
    if len(later) < len(earlier):
        return False
    if not earlier:
        return True
    last, its_successor = earlier[-1], later[len(earlier) - 1]
    before = zip(earlier[:-1], later, strict=False)
    return (
        all(one.role == other.role and one.content == other.content for one, other in before)
        and last.role == its_successor.role
        and its_successor.content.startswith(last.content)
    )
