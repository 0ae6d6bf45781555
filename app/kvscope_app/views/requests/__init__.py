"""The request table, and below it the block table and events of the selected one."""
