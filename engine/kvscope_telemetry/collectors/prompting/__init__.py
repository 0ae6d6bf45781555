"""Sends prompts to another engine through its OpenAI API and returns kvscope's reply messages. Uses no Qt."""
