"""The `engine` command."""
