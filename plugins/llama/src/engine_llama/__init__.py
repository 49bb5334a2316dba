"""The llama model family for Engine."""
