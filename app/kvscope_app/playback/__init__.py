"""Opening and playback of recordings: operations on the timeline, bar, slider and actions."""
