"""What clients ask and get, and what it means: bodies, answers, errors, and the way from one to the engine's messages.

Knows no sockets and no loop. `mapping` alone knows both OpenAI's fields and the engine's.
"""
