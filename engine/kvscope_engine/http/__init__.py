"""The OpenAI-compatible API: an asyncio process of its own, a client of the command socket like any other, no torch.

`engine_client` talks to the engine; `shapes/` is what clients ask and get; `completions` and `pages` are the endpoints,
`middleware` and `protocol` stand before them; `server` is the process, `command` its command line, and `child` starts
it beside an engine. Pages of others, such as metrics, are mounted in `app`.
"""
