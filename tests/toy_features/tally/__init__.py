"""Counts the even tokens of an answer, if a request asks for it, and writes the count behind the text."""
