"""Calls the API through LangChain: answer, stream, tools, structured output, Responses API. Prints a JSON object."""

from __future__ import annotations

import json

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


def main() -> None:
    chat = ChatOpenAI(model="default", temperature=0, max_tokens=40, timeout=600)
    question = "What is the capital of France?"
    answer = chat.invoke(question)
    forced = chat.bind_tools([weather], tool_choice="weather").invoke("How is the weather in Rome?")
    after = chat.invoke(
        [
            ("user", "How is the weather in Rome?"),
            forced,
            {"role": "tool", "tool_call_id": forced.tool_calls[0]["id"], "content": "sunny"},
            ("user", "Thank you."),
        ]
    )
    schema = {"title": "Pick", "type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    picked = chat.with_structured_output(schema, method="json_schema").invoke("One or two?")
    responses = ChatOpenAI(
        model="default", temperature=0, max_tokens=40, use_responses_api=True, store=False, timeout=600
    )
    print(
        json.dumps(
            {
                "answer": answer.content,
                "usage": answer.usage_metadata,
                "streamed": "".join(chunk.content for chunk in chat.stream(question)),
                "call": forced.tool_calls[0]["name"],
                "after": after.content,
                "picked": picked,
                "responses": responses.invoke(question).text,
                "responses streamed": "".join(chunk.text for chunk in responses.stream(question)),
            }
        )
    )


if __name__ == "__main__":
    main()
