"""Content of a chat message: text is read; images and audio are refused by type."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvscope_engine.http.schemas.api_errors import ApiError
from kvscope_engine.http.schemas.chat_rendering import message_text
from kvscope_engine.http.schemas.request_bodies import MessageBody


def message(*parts: dict[str, Any]) -> MessageBody:
    return msgspec.convert({"role": "user", "content": list(parts)}, MessageBody)


def test_text_parts_are_joined() -> None:
    assert message_text(message({"type": "text", "text": "a"}, {"type": "input_text", "text": "b"})) == "ab"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "http://localhost/x.mp4"}},
        {"type": "audio_url", "audio_url": {"url": "http://localhost/x.wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "image"},
    ],
    ids=lambda part: part["type"],
)
def test_image_and_audio_content_of_a_chat_message_is_refused_by_type(part: dict[str, Any]) -> None:
    words = f"content of type '{part['type']}' is not accepted: only text is read"
    with pytest.raises(ApiError, match=words) as refused:
        message_text(message({"type": "text", "text": "What is this?"}, part))
    assert refused.value.status == 400
