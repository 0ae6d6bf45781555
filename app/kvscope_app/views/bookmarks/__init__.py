"""View of bookmarks and past alarms."""
