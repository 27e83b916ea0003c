"""The processes that the verifier runs: the plain reference, and watched ranks of the plan."""
