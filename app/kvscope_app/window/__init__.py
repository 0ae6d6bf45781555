"""The main window and what stands in it beside the views: actions, docks, bars, sheets."""
