"""Turn a plan into processes on hosts: this host, ssh, MPI, Slurm, Ray, Kubernetes; rendered first, then sent."""
