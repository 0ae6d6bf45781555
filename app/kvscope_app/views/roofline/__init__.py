"""The roofline: what steps did of what the device can do."""
