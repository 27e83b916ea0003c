"""Support the gang schedulers, one per file: what each needs in the manifests, and its rules, checked offline."""
