"""Heads that draft from the hidden states of the target: EAGLE, EAGLE-3, multi-token prediction, Medusa."""
