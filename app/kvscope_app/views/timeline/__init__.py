"""The whole course of a session over time: lanes of what happened, and a lane a request."""
