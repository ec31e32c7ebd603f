"""Chats: messages checked and made plain, and the model's own template that makes one text of them."""
