"""Which chunk is whose: books of what was leased, made and learnt, and the thread that deals to each maker."""
