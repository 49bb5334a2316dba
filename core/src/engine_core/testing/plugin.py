"""Pytest plugin of the conformance kit."""
