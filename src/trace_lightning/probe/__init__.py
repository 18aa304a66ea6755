"""`trace-fit probe`: is this model ready for FP4 rollouts? Measured before anybody migrates.

plan       what is probed, and what is refused        agreement  trainer against rollout
study      the measurements, part by part             local      errors of single roundings, K's channels
outputs    rewards, loops, garble, intervals          paths      what a device does with each format
bands      bounds and what they rest on               verdict    findings, causes, go or stay
advice     the recipe to paste                        run        order of the parts; store keeps them
report     terminal, HTML, JSON; charts draws         command    options
"""
