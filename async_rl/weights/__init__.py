"""Versioned weights: the manifest that describes them, the segment that holds them, the chunk server and its client."""
