"""The math of a forward pass as about fifteen operations, and the backends that implement them."""
