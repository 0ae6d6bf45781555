"""Exception hierarchy of kvscope. Only a `main()` prints an error and chooses the exit code.

KvscopeError (exit code 1): a failure at run time.

- BadInput (exit code 2): a value or file is not accepted; the message names it and the accepted ones.
- EndpointInUse: another engine or program uses the endpoint.
- EngineDead: the engine ended while a request to it was pending.
- ProtocolError: the other side sent something that this version cannot read. Its subclass UnknownMessage: a message of
  a kind that only later versions have.
"""


class KvscopeError(Exception):
    """A failure that is shown to the user in one line."""

    exit_code = 1


class BadInput(KvscopeError, ValueError):
    """An invalid value. The message names it and the accepted ones."""

    exit_code = 2


class PromptTooLong(BadInput):
    """A prompt that leaves too few tokens for its output, in the model's context or in the whole block pool."""


class EndpointInUse(KvscopeError): ...


class EngineDead(KvscopeError): ...


class ProtocolError(KvscopeError): ...


class UnknownMessage(ProtocolError):
    """A valid message of a kind that this version does not have. Receivers skip and count it."""
