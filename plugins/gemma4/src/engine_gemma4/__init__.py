"""The Gemma 4 model family for Engine."""
