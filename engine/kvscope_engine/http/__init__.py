"""OpenAI-compatible HTTP API: a separate asyncio process that is an ordinary client of the command socket. No torch.

`engine_client` talks to the engine; `shapes/` defines request and response bodies; `completions` and `pages` are the
endpoints, behind `middleware` and `protocol`; `server` is the process, `http_command` its command line, and `child`
starts it next to an engine. Routes of other packages, such as metrics, are mounted in `server.make_app`.
"""
