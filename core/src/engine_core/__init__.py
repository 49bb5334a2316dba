"""Engine core."""

__version__ = "2026.11.0"
