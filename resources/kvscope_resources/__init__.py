"""Icons and other data. Data alone: nothing here runs."""
