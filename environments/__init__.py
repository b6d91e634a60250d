"""Environments for --env-id. No script imports them."""
