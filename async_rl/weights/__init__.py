"""Versioned weights: the manifest that describes them, the shared-memory segment that holds them, and the chunk server."""
