"""Turn a plan into processes on hosts: local, ssh, MPI, Slurm, Ray, Kubernetes; render first, then start."""
