"""Formats counts with their noun, for texts that users read."""


def counted(count: int, noun: str) -> str:
    """Return a text such as "1 block" or "2 blocks". The plural of `noun` must be formed with "s"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
