"""One step each: fetch artifacts, call the core, store the result."""
