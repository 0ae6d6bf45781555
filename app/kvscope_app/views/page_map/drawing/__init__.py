"""The pixels of the page map: geometry, colours, flashes. No widgets."""
