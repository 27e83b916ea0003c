"""What the verifier runs in processes of its own: the plain reference, and watched ranks of the plan."""
