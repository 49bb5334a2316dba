"""Turning logits into tokens: prefill, sampling and the decode loop."""
