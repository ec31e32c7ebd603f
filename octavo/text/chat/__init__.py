"""Chats: validation of messages, and the model's template that renders them to one text."""
