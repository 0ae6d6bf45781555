"""Counts with their noun in messages that people read."""


def counted(count: int, noun: str) -> str:
    """Return `1 block`, `2 blocks`; `noun` is one that takes an s."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
