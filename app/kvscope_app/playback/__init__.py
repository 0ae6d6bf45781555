"""Opening and playback of recordings: the operations on a timeline, and the playback bar, slider and actions."""
