"""Environments for --env-id, each in a module of its own: the scripts need none of them."""
