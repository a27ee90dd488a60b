"""Ranks and what they say to each other: launch, groups, meshes, collectives, emulated links."""
