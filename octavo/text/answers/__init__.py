"""What an answer may consist of: reasoning, content, calls. Its grammar, and the router that sorts its text."""
