"""The main window and its parts besides the views: actions, docks, bars, sheets."""
