"""One module or folder a view; each is a `View` of a `Session`."""
