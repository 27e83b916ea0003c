"""Render a job as Kubernetes manifests, check them offline, and submit them."""
