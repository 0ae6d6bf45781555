"""The timeline of a whole session: lanes of what happened, and a lane for each request."""
