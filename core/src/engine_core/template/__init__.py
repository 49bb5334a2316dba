"""Chat templates: where they come from, the bounded engine that renders them, the probe."""
