"""ColossalAI's plugins as boosters of ours: alone in the core, this package imports colossalai.

    ddp.DDPBooster        every rank holds everything; gradients are averaged during the backward pass
    zero.ZeroBooster      ZeRO-2: gradients, float32 masters and moments are divided among ranks
    gemini.GeminiBooster  weights too

Importing the package imports none of it; importing one of these modules imports ColossalAI, which takes seconds.
"""
