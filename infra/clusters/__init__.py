"""Ray clusters and their leases."""
