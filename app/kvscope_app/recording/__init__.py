"""Actions and dialogs for recordings, exports and the length of the history."""
