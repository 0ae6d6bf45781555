"""The views, a module or folder for each; each is a `View` of a `Session`."""
