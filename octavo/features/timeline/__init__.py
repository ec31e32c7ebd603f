"""Why a request took as long as it did: its timeline, and where the prefix cache missed."""
