"""What both sides are given."""

SEEDS = (0, 1, 2)
UPDATES = 120
SAMPLES = 128  # prompts of an update, one response each
MINI_BATCH = 32  # samples of an optimizer step
EPOCHS = 2  # passes over an update's samples
LR = 1e-4
BETAS = (0.9, 0.999)
CLIP, VALUE_CLIP, VF_COEF = 0.2, 0.2, 1.0
KL_COEF, GAMMA, LAM, TEMPERATURE = 0.02, 1.0, 0.95, 1.0
HELD_OUT_SEED = 999_999
