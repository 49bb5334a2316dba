"""From text to token ids and back, piece by piece."""
