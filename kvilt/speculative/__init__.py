"""Drafts: tokens a sample may draw next, proposed before it does, so that one step can compute several of them."""
