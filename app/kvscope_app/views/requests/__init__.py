"""Request table, and below it the block table and events of the selected request."""
