"""Token ids made into text again, up to a stop string, choice by choice."""
