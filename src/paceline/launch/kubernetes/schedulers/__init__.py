"""A file per gang scheduler: what it wants in a job's manifests, and its rules checked offline."""
