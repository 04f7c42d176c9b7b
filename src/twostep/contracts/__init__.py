"""Frozen messages between the parts. Needs only the standard library and msgspec."""
