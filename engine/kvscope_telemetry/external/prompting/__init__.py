"""Prompts sent to another engine through its OpenAI API, answered in our own messages. Knows no Qt."""
