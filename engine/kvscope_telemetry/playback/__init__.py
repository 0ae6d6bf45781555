"""Plays a recording or a ring as a source: playback clock, thread, and conversion of messages to updates."""
