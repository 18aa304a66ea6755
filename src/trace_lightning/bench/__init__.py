"""`trace-fit bench`: how fast the rollout engine is on this machine, beside what the machine could do at best.

    shapes      the models, with random weights           machine     copy bandwidth, matmul rate, memory, clocks
    roofline    the least time a step can take            workload    a cache full of tokens, and sequences that decode
    measure     times and bytes of one engine             parts       which kernel belongs to which part of a step
    baselines   transformers on the same prompts          runner      options, checks, the whole report
    report      tables and JSON

Every number is measured in one process, so that its ratios hold on a machine whose clocks drift.
"""
