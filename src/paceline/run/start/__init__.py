"""Start the job that a request asks for, or become a part of it; no torch here."""
