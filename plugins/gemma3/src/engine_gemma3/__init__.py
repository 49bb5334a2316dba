"""The Gemma 3 model family for Engine."""
