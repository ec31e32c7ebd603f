"""Token ids in, token ids out: for routers and trainers that keep the text to themselves."""
