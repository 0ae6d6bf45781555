"""Request and response bodies, errors, and the mapping between OpenAI's fields and the engine's messages.

Knows no sockets and no event loop. Only `sampling_mapping` knows both OpenAI's fields and the engine's.
"""
