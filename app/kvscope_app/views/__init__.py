"""Views of the main window, one module or package each. Each is a `View` of a `Session`."""
