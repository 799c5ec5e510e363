"""What a packed block is, and the reference way to unpack it."""
