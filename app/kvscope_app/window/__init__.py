"""The main window and its parts besides the views: menus, docks, bars, sheets."""
