"""Playback of recordings: clock, bar and actions."""
