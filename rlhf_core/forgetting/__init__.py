"""What a policy still knows beside its task: text that is packaged here, and suites of questions."""
