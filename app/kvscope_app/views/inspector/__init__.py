"""Everything about the selected block, request or step; the life of the block; and finding them."""
