"""Device memory as the host sees it: the unified pool and the prefix tree over it. No jax in here."""
