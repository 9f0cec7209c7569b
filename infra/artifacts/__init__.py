"""The artifact store."""
