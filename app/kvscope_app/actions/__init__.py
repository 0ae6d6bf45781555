"""Actions of a window: registry, shortcuts, command palette and undo."""
