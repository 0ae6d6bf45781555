"""Format of a model's answers: reasoning, content and tool calls, how they are read, and how calls are forced.

`tool_call_formats` is the table of formats, composed of the parsers in `call_parsers`. `answer_reader` reads an answer
while it streams: it separates the reasoning and finds calls with `tool_call_reader`. `harmony_reader` does both for
gpt-oss. `structural_tags` builds the structural tag of an answer that must consist of calls. `answer_format` combines
them for one request.
"""
