"""Actions of a window: the registry of actions, their shortcuts, the command palette and undo."""
