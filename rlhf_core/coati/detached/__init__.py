"""coati's detached classes, for scripts: shells around the learner, the experience maker and the scheduler."""
