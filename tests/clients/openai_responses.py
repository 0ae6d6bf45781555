"""Runs a conversation with a function through OpenAI's client and its Responses API. Prints a JSON object."""

from __future__ import annotations

import json
from typing import Any

import openai


def main() -> None:
    client = openai.OpenAI(max_retries=0, timeout=600)
    asked: dict[str, Any] = {"model": "default", "temperature": 0, "max_output_tokens": 40, "store": False}
    tool: Any = {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"]},
    }
    items: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
    first = client.responses.create(
        **asked, input=items, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    items += [item.model_dump() for item in first.output]
    calls = [item for item in first.output if item.type == "function_call"]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    second = client.responses.create(**asked, input=items, include=["reasoning.encrypted_content"])
    with client.responses.stream(**asked, input="What is the capital of France?") as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response().output_text
    whole = client.responses.create(**asked, input="What is the capital of France?").output_text
    print(
        json.dumps(
            {
                "calls": [call.name for call in calls],
                "second": second.output_text,
                "kinds": sorted(set(kinds)),
                "streamed": streamed,
                "whole": whole,
            }
        )
    )


if __name__ == "__main__":
    main()
