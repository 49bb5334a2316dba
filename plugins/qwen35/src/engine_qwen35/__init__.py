"""The Qwen3.5 model family for Engine."""
