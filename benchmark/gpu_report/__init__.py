"""First numbers from a GPU, in minutes. See __main__.py."""
