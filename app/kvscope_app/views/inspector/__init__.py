"""Inspector: facts about the selected block, request or step, the history of the block, and the search dialog."""
