"""The main window without its views: menus, docks, bars and dialogs."""
