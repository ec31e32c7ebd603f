"""Routes with token ids in and out: for routers and trainers that handle text themselves."""
