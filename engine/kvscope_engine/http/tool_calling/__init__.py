"""Tool calls: how each family of models writes them, how they are parsed from an answer, and how they are forced.

`tool_call_formats` is the table of formats, composed of the parsers in `call_parsers`; `tool_call_reader` finds calls
in a streaming answer; `structural_tags` builds the structural tag of an answer that must consist of calls;
`answer_format` combines them for one request.
"""
