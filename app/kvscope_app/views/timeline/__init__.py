"""Timeline of a whole session: lanes of engine activity, and a lane for each request."""
