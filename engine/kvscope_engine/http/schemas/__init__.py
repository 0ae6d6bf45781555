"""Request and response bodies, errors, and the mapping between OpenAI's fields and the engine's messages.

Independent of sockets and the event loop. Only `sampling_mapping` depends on both OpenAI's fields and the engine's.
"""
