"""The engine's benchmark."""
