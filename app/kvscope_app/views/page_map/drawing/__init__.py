"""Pixels of the page map: geometry, colours and flashes. Imports no widgets."""
