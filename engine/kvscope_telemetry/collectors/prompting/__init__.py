"""Sends prompts to an external engine through its OpenAI API and returns kvscope's reply messages. Uses no Qt."""
