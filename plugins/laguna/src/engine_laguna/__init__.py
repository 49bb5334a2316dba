"""The Laguna model family for Engine."""
