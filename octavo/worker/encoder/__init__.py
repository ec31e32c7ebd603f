"""Encoders: every request is one row of one step, and nothing is kept between steps."""
