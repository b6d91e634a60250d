"""What the tools share; imports none of them."""
