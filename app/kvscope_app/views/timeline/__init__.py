"""The whole overview of a session over time: lanes of what happened, and a lane a request."""
