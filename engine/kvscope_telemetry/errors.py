"""The error tree of kvscope. Only a `main()` prints one and chooses the exit code.

KvscopeError              exit code 1: a failure at run time
├── BadInput              exit code 2: a value or a file that cannot be accepted; names it and what is
├── EndpointInUse         another engine, or another program, holds the endpoint
├── EngineDead            the engine ended while something was still asked of it
└── ProtocolError         the other side sent what this version cannot read
    └── UnknownMessage    a whole message of a kind that only a later version knows
"""


class KvscopeError(Exception):
    """A failure that is shown to a person in one line."""

    exit_code = 1


class BadInput(KvscopeError, ValueError):
    """A value that cannot be accepted; the message names it and says what is accepted."""

    exit_code = 2


class EndpointInUse(KvscopeError):
    """The endpoint is held by another engine or program."""


class EngineDead(KvscopeError):
    """The engine ended while something was still asked of it."""


class ProtocolError(KvscopeError):
    """The other side sent something this version cannot read."""


class UnknownMessage(ProtocolError):
    """A sound message of a kind that this version has no name for: to be skipped, and counted."""
