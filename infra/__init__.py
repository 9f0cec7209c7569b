"""What it runs on."""
