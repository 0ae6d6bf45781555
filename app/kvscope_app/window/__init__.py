"""The main window and its parts except the views: menus, docks, bars and dialogs."""
