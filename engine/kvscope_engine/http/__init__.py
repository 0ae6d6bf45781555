"""OpenAI-compatible HTTP API: a separate asyncio process that is an ordinary client of the command socket. No torch.

`engine_client` connects to the engine; `schemas/` defines request and response bodies; `completions`, `info_endpoints`
and `adapter_endpoints` are the endpoints, behind `middleware` and `http_connection`; `http_server` is the process,
`http_command` its command line, and `http_child` starts it next to an engine. Routes of other packages, such as
metrics, are mounted in `http_server.make_app`.
"""
