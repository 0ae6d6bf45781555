"""The list of bookmarks and of past alarms."""
