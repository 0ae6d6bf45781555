"""A report: one HTML file that a person sends to another."""
