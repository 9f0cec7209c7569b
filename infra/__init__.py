"""What the pipeline runs on: settings, the artifact store, Ray clusters, the local services."""
