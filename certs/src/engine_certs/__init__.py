"""Certificates shipped with Engine: data only, read through importlib.resources."""
