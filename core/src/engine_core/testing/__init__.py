"""Conformance kit for family plugins."""
