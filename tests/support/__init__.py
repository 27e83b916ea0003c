"""What several tests use: models, ranks in processes, clusters, simulators, faults."""
