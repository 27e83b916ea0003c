"""Save and load a job's state: safetensors per rank, and a manifest that is written last."""
