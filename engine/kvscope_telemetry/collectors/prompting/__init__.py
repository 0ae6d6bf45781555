"""Sends prompts to another engine through its OpenAI API and returns kvscope's own reply messages. Uses no Qt."""
