"""What a reply means beyond its text: accepted tool calls and values that satisfy a schema."""
