"""The parts of an answer: reasoning, content, tool calls. Their grammar, and the router that separates them."""
